"""A damaged checkpoint is ignored: the run resumes from the one before, or is refused."""

import json
import os

import pytest
import torch
import yaml
from helpers import slow
from stopped import equal, outcome, run_small
from tiny import TINY_RUN, config_of

from contrafed import run
from contrafed.core.errors import UserError
from contrafed.core.run_folder import read_config
from contrafed.report.runs import read
from contrafed.runs import checkpoint


def damage_state(folder):
    (folder / "checkpoints" / "000004" / "state.json").write_text('{"round": 4')


def damage_server(folder):
    file = folder / "checkpoints" / "000004" / "server.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def damage_client(folder):
    file = next((folder / "checkpoints" / "clients").glob("*-4.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def damage_numbers(folder):
    """Replace the last numbers by zeros, with the file's length and header unchanged."""
    file = folder / "checkpoints" / "000004" / "server.safetensors"
    file.write_bytes(file.read_bytes()[:-200] + bytes(200))


def damage_remembered_numbers(folder):
    file = next((folder / "checkpoints" / "clients").glob("*-4.safetensors"))
    file.write_bytes(file.read_bytes()[:-200] + b"\xff" * 200)


def endless_round(folder):
    file = folder / "checkpoints" / "000004" / "state.json"
    file.write_text(file.read_text().replace('"round": 4', '"round": Infinity'))


def half_written(folder):
    os.rename(folder / "checkpoints" / "000004", folder / "checkpoints" / ".000004.part")


SLOW_DAMAGES = (damage_server, damage_remembered_numbers, endless_round, half_written)


@pytest.mark.parametrize("damage", [damage_state, damage_client, damage_numbers, *map(slow, SLOW_DAMAGES)])
def test_a_damaged_checkpoint_is_passed_over(stop_run, whole, damage):
    folder = stop_run()
    damage(folder)
    assert run_small(folder, "resume=latest")["resumed_from"].endswith("000002")
    assert equal(outcome(folder), whole)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(stop_run, expect_error):
    folder = stop_run()
    for path in folder.glob("checkpoints/0*/state.json"):
        path.write_text(path.read_text()[:99])
    before = (folder / "metrics.csv").read_bytes()
    with expect_error("resume"):
        run_small(folder, "resume=latest")
    assert (folder / "metrics.csv").read_bytes() == before
    assert len(list(folder.glob("checkpoints/0*"))) == 2


def test_files_of_a_checkpoint_that_was_cut_off_are_not_taken_for_spare_ones(tmp_path):
    """The same checkpoint gives these names to its own files, written after one of another round."""
    memory = {client: {"a": torch.full((3,), float(client))} for client in range(6)}
    keeper = checkpoint.Checkpoints(tmp_path, {"checkpoint_keep": 1}, None)
    keeper.save(20, {}, {}, memory, {})
    keeper.wait()
    for client in range(3):
        (tmp_path / "checkpoints" / "clients" / f"{client}-40.safetensors").write_bytes(b"cut off")
    for t in (30, 40):
        keeper.save(t, {}, {}, memory, {})
    keeper.close()
    found = checkpoint.find(tmp_path)
    assert found.server_round == 40
    assert {client: tensors["a"].tolist() for client, tensors in found.client_states()} == {
        client: [client] * 3 for client in range(6)
    }


def test_a_run_goes_on_beside_a_damaged_newer_checkpoint(stop_run, whole):
    """The damaged one neither replaces a valid one nor is read again. After 000006 replies were accepted."""
    folder = stop_run()
    damage_state(folder)
    run_small(folder, "checkpoint_every=1", "checkpoint_keep=1", "resume=latest")
    assert equal(outcome(folder), whole)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["000006", "000007", "clients"]


def check_refusal(match, function, *arguments):
    with pytest.raises(UserError, match=match) as found:
        function(*arguments)
    assert "\n" not in str(found.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with a checkpoint, and with the names that a run had."""
    out = tmp_path_factory.mktemp("old") / "run"
    run(config_of(*TINY_RUN, "strategy=fedavg", "engine=local", "checkpoint_every=1", f"output_dir={out}"))
    return out


def make_old(folder):
    """Give a folder's configuration and checkpoints an old name and no number of their format."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["num_nodes"] = config.pop("num_clients")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for file in folder.glob("checkpoints/*/state.json"):
        content = json.loads(file.read_text())
        del content["format"], content["sha256"]
        content["nodes"] = content.pop("clients")
        file.write_text(json.dumps(content))


def test_they_are_refused(folder):
    newest = checkpoint.list_checkpoints(folder / checkpoint.FOLDER)[-1]
    assert checkpoint.find(folder).path == newest
    make_old(folder)
    check_refusal("resume: .*another Contrafed", checkpoint.find, folder)
    check_refusal("resume: .*another Contrafed", checkpoint.find, newest)
    check_refusal("older Contrafed", read_config, folder)
    check_refusal("older Contrafed", read, folder, "run")
    again = ["engine=local", f"output_dir={folder.parent}/again"]
    check_refusal("another Contrafed", lambda: run(config_of(*TINY_RUN, "strategy=fedavg", f"resume={folder}", *again)))
    check_refusal("older Contrafed", lambda: run(config_of(f"evaluate_only={folder}", *again)))
