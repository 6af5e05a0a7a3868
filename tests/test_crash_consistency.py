"""A run's folder after disk errors, Ctrl-C, another process or a time limit: it never has less than before."""

import errno
import os
from pathlib import Path

import pytest
import yaml
from helpers import config_of, same
from safetensors.torch import load_file, save_file

from contrafed.core.errors import DiskError, UserError
from contrafed.runs import checkpoint
from contrafed.runs.output import RunRecorder, figures
from contrafed.runs.run import run
from contrafed.runs.session import Session

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
        with pytest.raises(DiskError, match="resume=latest goes on from round 2 once it can"):
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
        with pytest.raises(UserError, match=r"resume: .*000002 is gone or cannot be read any more"):
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
