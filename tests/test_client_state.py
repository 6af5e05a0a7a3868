"""Client state on three tiers."""

import errno
import json
import os

import pytest
import torch
from accelerator import NAME, There, accelerator
from helpers import config_of, same, slow
from safetensors.torch import load_file

import contrafed.engines.client_state
from contrafed.core.disk import told_in_one_line
from contrafed.core.errors import DiskError
from contrafed.core.tensors import size_of
from contrafed.engines.client_state import ClientStateStore, _available, default_budgets
from contrafed.runs.run import run

STATE_BYTES = 8 * 4  # bytes of one client state below


def memory(value):
    return {"a": torch.full((6,), float(value)), "b": torch.full((2,), -float(value))}


def on_device(value):
    return {name: tensor.to(NAME) for name, tensor in memory(value).items()}


def test_the_longest_unused_moves_down_tier_by_tier(tmp_path):
    with accelerator():
        held = ClientStateStore(2 * STATE_BYTES, 3 * STATE_BYTES, str(tmp_path))
        for client in range(7):
            held.store(client, on_device(client))
        assert held.cost()[1:] == (2 * STATE_BYTES, 3 * STATE_BYTES, 2 * STATE_BYTES)
        assert set(held) == set(range(7))
        assert [isinstance(held.get(client)["a"], There) for client in range(7)] == [False] * 5 + [True] * 2
        assert all(same({n: t.cpu() for n, t in held.get(client).items()}, memory(client)) for client in range(7))
        (folder,) = tmp_path.iterdir()
        assert {path.stem for path in folder.iterdir()} == {"0", "1"}
        held.store(0, on_device(10))  # back from the disk, as the newest: 5 and 2 move down
        assert held.cost()[1:] == (2 * STATE_BYTES, 3 * STATE_BYTES, 2 * STATE_BYTES)
        assert {path.stem for path in folder.iterdir()} == {"1", "2"}
        assert float(held.get(0)["a"][0]) == 10
        held.clear()
    assert not list(tmp_path.iterdir())
    assert not list(held)
    assert held.get(3) == {}


def test_a_memory_is_counted_once_however_often_it_changes(tmp_path):
    held = ClientStateStore(0, 10 * STATE_BYTES, str(tmp_path))
    for value in range(5):
        held.store(3, memory(value))
    assert held.used == {"device": 0, "host": STATE_BYTES, "disk": 0}
    assert same(held.get(3), memory(4))
    assert held.get(9) == {}
    assert 9 not in held


def test_without_any_budget_everything_is_on_disk_and_costs_time(tmp_path):
    held = ClientStateStore(0, 0, str(tmp_path))
    with accelerator():
        held.store(1, on_device(5))
    assert held.used == {"device": 0, "host": 0, "disk": STATE_BYTES}
    assert same(held.get(1), memory(5))
    assert held.cost().seconds > 0
    assert held.cost().seconds == 0
    held.clear()


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path, expect_error):
    held = ClientStateStore(0, 0, str(tmp_path / "none"))
    with expect_error("engine.memory_folder"):
        held.store(1, memory(1))


def test_a_disk_that_fills_up_is_not_the_users_mistake(tmp_path, monkeypatch):
    """The run ends as with a full run folder, and resume=latest continues it."""

    def full(path, tensors, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(contrafed.engines.client_state, "write", full)
    said = f"^cannot write to {tmp_path} \\(No space left on device\\); go on$"
    with pytest.raises(DiskError, match=said), told_in_one_line(tmp_path / "run", lambda: "go on"):
        ClientStateStore(0, 0, str(tmp_path)).store(1, memory(1))


def test_a_containers_limit_is_the_memory_that_there_is(tmp_path):
    free = _available(tmp_path)
    for name, text in (("max", "1000000\n"), ("current", "400000\n"), ("stat", "anon 1\ninactive_file 100000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert _available(tmp_path) == 700000
    (tmp_path / "memory.max").write_text("max\n")
    assert _available(tmp_path) == pytest.approx(free, rel=0.5)


def test_default_budgets_are_of_what_there_is():
    device, host = default_budgets("cpu")
    assert device == 0
    assert 2**20 < host < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def times_of(folder):
    return [line.split(",") for line in (folder / "times.csv").read_text().splitlines()]


@pytest.mark.parametrize("name", ["pmfl", slow("fedcrl")])
def test_a_run_from_disk_equals_a_run_from_memory(tmp_path, name):
    small = (
        f"strategy={name}", "num_clients=5", "num_rounds=4", "participation=uniform", "participation.select=3", "model=mlp",
        "model.hidden=[12]", "partition.min_client_size=5", "engine=local", "checkpoint_every=2",
    )  # fmt: skip
    (tmp_path / "spill").mkdir()
    run(config_of(*small, f"output_dir={tmp_path}/plain"))
    budget = int(times_of(tmp_path / "plain")[-1][4]) // 2
    tiers = (f"engine.memory_folder={tmp_path}/spill", f"engine.memory_host_bytes={budget}")
    run(config_of(*small, *tiers, f"output_dir={tmp_path}/tiers"))
    assert same(*(load_file(tmp_path / folder / "model.safetensors") for folder in ("plain", "tiers")))
    for log in ("metrics.csv", "clients.csv"):
        assert (tmp_path / "plain" / log).read_bytes() == (tmp_path / "tiers" / log).read_bytes()
    header, *rows = times_of(tmp_path / "tiers")
    assert header[2:] == [
        "memory_seconds",
        "memory_device",
        "memory_host",
        "memory_disk",
        "aggregate_seconds",
        "largest_weight",
    ]
    assert float(rows[-1][2]) > 0
    assert 0 < int(rows[-1][4]) <= budget <= int(rows[-1][5])
    assert not list((tmp_path / "spill").iterdir())
    assert json.loads((tmp_path / "tiers" / "summary.json").read_text())["failures"] == 0


@pytest.mark.slow
def test_ray_shows_what_memory_costs(tmp_path):
    """After every round it reports as many bytes as engine=local, and the seconds of moving them."""
    small = (
        "strategy=pmfl", "num_clients=5", "num_rounds=4", "participation=uniform", "participation.select=3", "model=mlp",
        "model.hidden=[12]", "partition.min_client_size=5", "checkpoint_every=2",
    )  # fmt: skip
    rows = {}
    for name, more in (("local", ("engine=local",)), ("ray", ("engine=ray", "engine.workers=2"))):
        run(config_of(*small, *more, f"output_dir={tmp_path / name}"))
        rows[name] = times_of(tmp_path / name)[1:]
    held = [[int(row[3]) + int(row[4]) + int(row[5]) for row in rows[name]] for name in ("local", "ray")]
    assert held[0] == held[1]
    assert 0 < held[1][0] < held[1][-1]
    assert all(0 < float(row[2]) < 2 * float(row[1]) for row in rows["ray"])  # at most what two workers have
    resumed = f"resume={tmp_path / 'ray' / 'checkpoints' / '000002'}"
    run(config_of(*small, *more, resumed, f"output_dir={tmp_path / 'on'}"))
    assert int(times_of(tmp_path / "on")[-1][4]) == held[1][-1]


def test_size_of_counts_bytes():
    assert size_of({"a": torch.zeros(3, dtype=torch.float64), "b": torch.zeros(2, dtype=torch.int64)}) == 40
