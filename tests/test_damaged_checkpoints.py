"""A damaged checkpoint is ignored: the run resumes from the one before, or is refused."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from helpers import config_of, same, slow
from safetensors.torch import load_file, save_file
from stopped import equal, outcome, run_small
from tiny import TINY_RUN

from contrafed.core.errors import DiskError, UserError
from contrafed.core.run_folder import read_config
from contrafed.report.runs import read
from contrafed.runs import checkpoint
from contrafed.runs.output import RunRecorder, figures
from contrafed.runs.run import run
from contrafed.runs.session import Session


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


QUICK_RUN = (
    "strategy=fedavg", "engine=local", "tracker=none", "num_clients=4", "num_rounds=4", "model=mlp", "model.hidden=[8]",
)  # fmt: skip
KEEP_CHECKPOINTS = ("checkpoint_every=2", "checkpoint_keep=9")


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupt_run(folder, *asked):
    """Return a run that Ctrl-C ended in its third round."""

    def stop(server_round, _):
        if server_round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config_of(*QUICK_RUN, *asked, f"output_dir={folder}"), on_round=stop)
    return folder


def test_a_disk_that_fails_as_a_run_goes_on_takes_nothing_from_its_folder(tmp_path, monkeypatch):
    folder = interrupt_run(tmp_path / "run", *KEEP_CHECKPOINTS)
    kept = {name: (folder / name).read_bytes() for name in ("config.yaml", "summary.json")}
    again = config_of(*QUICK_RUN, *KEEP_CHECKPOINTS, "resume=latest", "verbose=true", f"output_dir={folder}")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(DiskError, match="resume=latest continues from round 2"):
            run(again)
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert run(again)["rounds"] == 4
    assert yaml.safe_load((folder / "config.yaml").read_text())["verbose"] is True


def test_a_configuration_that_is_the_same_is_not_written_again(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 1\n")
    written = (tmp_path / "config.yaml").stat().st_mtime_ns
    RunRecorder(tmp_path, "a: 1\n").close()
    assert (tmp_path / "config.yaml").stat().st_mtime_ns == written


def test_a_checkpoint_that_is_gone_when_the_run_begins_is_no_beginning(tmp_path, monkeypatch):
    folder = interrupt_run(tmp_path / "run", *KEEP_CHECKPOINTS)
    there, found = sorted((folder / "checkpoints").iterdir()), []
    real = checkpoint.find

    def once(where):
        found.append(real(where) if not found else None)
        return found[-1]

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "find", once)
        with pytest.raises(UserError, match=r"resume: .*000002 is gone or cannot be read"):
            run(config_of(*QUICK_RUN, *KEEP_CHECKPOINTS, "resume=latest", f"output_dir={folder}"))
    assert sorted((folder / "checkpoints").iterdir()) == there
    assert run(config_of(*QUICK_RUN, *KEEP_CHECKPOINTS, "resume=latest", f"output_dir={folder}"))["resumed_from"]


def test_ctrl_c_ends_a_run_whose_disk_is_full(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Session, "finish", full)
    interrupt_run(tmp_path / "run")
    assert "run is not complete: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.figures
def test_no_run_is_finished_without_its_figures(tmp_path, monkeypatch):
    folder, asked = tmp_path / "run", config_of(*QUICK_RUN, *KEEP_CHECKPOINTS, f"output_dir={tmp_path}/run")
    with monkeypatch.context() as patched:
        patched.setattr(figures, "accuracy_figure", full)
        with pytest.raises(DiskError):
            run(asked)
    assert not (folder / "summary.json").exists()
    assert run({**asked, "resume": "latest"})["status"] == "finished"
    assert (folder / "accuracy.png").exists()


def test_a_run_goes_on_without_the_file_that_it_began_from(tmp_path):
    run(config_of(*QUICK_RUN, "seed=1", f"output_dir={tmp_path}/first"))
    model = tmp_path / "model.safetensors"
    (tmp_path / "first" / "model.safetensors").rename(model)
    began = (*KEEP_CHECKPOINTS, f"init_from={model}")
    run(config_of(*QUICK_RUN, *began, f"output_dir={tmp_path}/whole"))
    folder = interrupt_run(tmp_path / "run", *began)
    model.unlink()
    with pytest.raises(UserError, match="init_from: there is no file"):
        run(config_of(*QUICK_RUN, *began, f"output_dir={tmp_path}/anew"))
    assert run(config_of(*QUICK_RUN, *began, "resume=latest", f"output_dir={folder}"))["rounds"] == 4
    assert same(*(load_file(path / "model.safetensors") for path in (folder, tmp_path / "whole")))


def test_a_model_with_more_layers_is_refused(tmp_path):
    run(config_of(*QUICK_RUN, "num_rounds=1", "model.hidden=[8,8]", f"output_dir={tmp_path}/deep"))
    with pytest.raises(UserError, match=r"does not fit: it has encoder.stages.1.*, which this model has not"):
        run(config_of(*QUICK_RUN, f"init_from={tmp_path}/deep/model.safetensors", f"output_dir={tmp_path}/run"))
    assert not (tmp_path / "run").exists()
    save_file({}, tmp_path / "nothing.safetensors")
    with pytest.raises(UserError, match="does not fit: .* found none"):
        run(config_of(*QUICK_RUN, f"init_from={tmp_path}/nothing.safetensors", f"output_dir={tmp_path}/run"))
