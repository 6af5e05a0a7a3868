"""What a run has on the disk is known to be what was written: a change is noticed, and never goes on to other numbers."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import config_of, slow
from stopped import equal, outcome, run_small
from test_deployment import wait_for

from contrafed.core.errors import RunStopped, UserError
from contrafed.engines.client_state import ClientStateStore
from contrafed.runs import checkpoint
from contrafed.runs.run import run


def resume(folder, *overrides):
    return run_small(folder, *overrides, "checkpoint_every=2", "resume=latest")


def test_a_flipped_round_is_no_checkpoint(stop_run, whole):
    folder = stop_run()
    file = folder / "checkpoints" / "000004" / "state.json"
    file.write_text(file.read_text().replace('"round": 4', '"round": 5'))
    assert resume(folder)["resumed_from"].endswith("000002")
    assert equal(outcome(folder), whole)


def test_any_flipped_byte_of_a_state_is_noticed(stop_run):
    folder = stop_run()
    file = folder / "checkpoints" / "000004" / "state.json"
    good = file.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(good), 50).tolist():
        file.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        assert checkpoint.find(folder).server_round == 2
    file.write_bytes(good)
    assert checkpoint.find(folder).server_round == 4


@pytest.mark.parametrize("name", ["metrics", "clients"])
def test_a_log_of_the_same_length_with_other_numbers_is_refused(stop_run, name):
    folder = stop_run()
    log = folder / f"{name}.csv"
    content = log.read_bytes()
    log.write_bytes(content[:60] + bytes([content[60] ^ 1]) + content[61:])
    with pytest.raises(UserError, match=f"resume: .*{name}.csv"):
        resume(folder)


@pytest.mark.parametrize("name", ["times", "participants"])
@pytest.mark.parametrize("how", ["missing", "other"])
def test_a_log_that_no_number_depends_on_begins_anew_with_a_line(stop_run, whole, capsys, name, how):
    folder = stop_run()
    log = folder / f"{name}.csv"
    if how == "missing":
        log.unlink()
    else:
        log.write_bytes(b"x" * log.stat().st_size)
    resume(folder)
    assert f"{name}.csv" in capsys.readouterr().out
    assert equal(outcome(folder), whole)
    assert min(int(line.split(",")[0]) for line in log.read_text().splitlines()[1:]) == 5
    assert log.with_name(f"{name}.csv.damaged").exists() == (how == "other")
    assert checkpoint.find_damaged_logs(checkpoint.find(folder)) == []


def test_participants_are_needed_where_privacy_is_counted(stop_run):
    private = ("privacy=central", "privacy.seeded_noise=true")
    folder = stop_run("fedavg", *private)
    (folder / "participants.csv").unlink()
    with pytest.raises(UserError, match="resume: .*participants.csv"):
        run_small(folder, *private, "resume=latest", method="fedavg")


def disturb_run(folder, change, *overrides):
    """Run with a change of the folder after round 5; returns the error."""

    def on_round(server_round, values):
        if server_round == 5:
            wait_for("the checkpoint, which a thread writes", (folder / "checkpoints" / "000004").exists)
            change()

    with pytest.raises(RunStopped) as caught:
        run_small(folder, *overrides, "checkpoint_every=2", on_round=on_round)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def summary_of(folder):
    return json.loads((folder / "summary.json").read_text())


def replace_metrics(folder):
    (folder / "other").write_text("round,scope,split,metric,value\n")
    os.replace(folder / "other", folder / "metrics.csv")


def append_to_metrics(folder):
    with (folder / "metrics.csv").open("a") as file:
        file.write("9,global,test,accuracy,1.0\n")


CHANGES = {"replaced": replace_metrics, "removed": lambda f: (f / "metrics.csv").unlink(), "appended": append_to_metrics}


@pytest.mark.parametrize("how", ["replaced", slow("removed"), slow("appended")])
def test_a_log_that_is_changed_in_mid_run_is_noticed_and_restored(tmp_path, whole, how):
    folder = tmp_path / "run"
    assert "metrics.csv" in disturb_run(folder, lambda: CHANGES[how](folder))
    assert summary_of(folder)["status"] == "failed"
    resume(folder)
    assert equal(outcome(folder), whole)


def test_a_log_that_is_emptied_in_mid_run_is_noticed(tmp_path):
    folder = tmp_path / "run"
    said = disturb_run(folder, lambda: os.truncate(folder / "metrics.csv", 0))
    assert "metrics.csv" in said
    assert summary_of(folder)["rounds"] == 6
    with pytest.raises(UserError, match="resume: .*metrics.csv"):
        resume(folder)


def test_a_folder_that_is_renamed_in_mid_run_is_followed(tmp_path, whole):
    folder, new = tmp_path / "run", tmp_path / "new"
    assert str(new) in disturb_run(folder, lambda: folder.rename(new))
    assert summary_of(new)["status"] == "failed"
    assert not folder.exists()
    resume(new)
    assert equal(outcome(new), whole)


def test_a_folder_that_is_removed_in_mid_run_is_written_again(tmp_path, whole):
    folder = tmp_path / "run"
    assert str(folder) in disturb_run(folder, lambda: shutil.rmtree(folder))
    assert summary_of(folder)["status"] == "failed"
    assert (folder / "model.safetensors").exists()
    assert (folder / "metrics.csv").read_text().count("global,test,accuracy") == 4  # rounds 0, 2, 4 and 6
    resume(folder)
    assert equal(outcome(folder), whole)


ON_DISK = ("engine.memory_host_bytes=0",)


@pytest.mark.parametrize("how", ["flipped", slow("file removed"), slow("folder removed")])
def test_client_state_on_the_disk_that_another_program_changes_ends_the_run(tmp_path, whole, how):
    folder, spilled = tmp_path / "run", tmp_path / "spilled"
    spilled.mkdir()

    def change():
        (there,) = spilled.iterdir()
        for file in there.iterdir():
            if how == "flipped":
                content = bytearray(file.read_bytes())
                content[-5] ^= 64
                file.write_bytes(content)
            elif how == "file removed":
                file.unlink()
        if how == "folder removed":
            shutil.rmtree(there)

    said = disturb_run(folder, change, *ON_DISK, f"engine.memory_folder={spilled}")
    assert "engine.memory_folder" in said
    assert summary_of(folder)["status"] == "failed"
    resume(folder)
    assert equal(outcome(folder), whole)


def test_client_state_that_is_whole_is_read_back(tmp_path):
    import torch

    memory = ClientStateStore(0, 0, str(tmp_path))
    memory.store(1003, {"a": torch.arange(4.0)})
    assert memory.get(1003)["a"].tolist() == [0, 1, 2, 3]
    memory.store(1003, {"a": torch.zeros(2)})
    assert memory.cost().disk == 8
    memory.clear()


def images(path, shift=0, pixel=0):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 200, (120, 8, 8), dtype=np.uint8), (np.arange(120) + shift) % 3
    x[60, 3, 3] += pixel
    np.savez(path, x=x, y=y)


OWN = ("engine=local", "num_clients=3", "num_rounds=4", "model=mlp", "model.hidden=[4]", "partition=iid", "dataset=npz")


@pytest.mark.parametrize("change", [{"shift": 1}, {"pixel": 1}])
def test_a_run_is_not_resumed_with_other_data(tmp_path, change):
    images(tmp_path / "x.npz")
    config = (*OWN, f"dataset.path={tmp_path}/x.npz", "checkpoint_every=1", f"output_dir={tmp_path}/run")
    first = run(config_of(*config))
    images(tmp_path / "x.npz", **change)
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    with pytest.raises(UserError, match="resume: the data"):
        run(config_of(*config, "resume=latest"))
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before
    images(tmp_path / "x.npz")
    assert run(config_of(*config, "resume=latest"))["data_fingerprint"] == first["data_fingerprint"]


def test_a_run_is_not_evaluated_on_other_data(tmp_path):
    """Its clients' test parts could then have examples that they trained on."""
    images(tmp_path / "x.npz")
    run(config_of(*OWN, f"dataset.path={tmp_path}/x.npz", "num_rounds=1", f"output_dir={tmp_path}/run"))
    again = ("engine=local", f"evaluate_only={tmp_path}/run", f"output_dir={tmp_path}/again")
    assert run(config_of(*again))["status"] == "finished"
    images(tmp_path / "x.npz", shift=1)
    with pytest.raises(UserError, match="evaluate_only: the data"):
        run(config_of(*again))


def test_a_run_is_not_resumed_with_another_file_of_a_partition(tmp_path):
    images(tmp_path / "x.npz")
    parts = tmp_path / "parts.json"
    parts.write_text(json.dumps([list(range(k, 60, 3)) for k in range(3)]))
    config = (*OWN[:-2], "dataset=npz", f"dataset.path={tmp_path}/x.npz", "partition=file", f"partition.path={parts}")
    config += ("dataset.merge_splits=true", "partition.test_fraction=0.2", "checkpoint_every=1", f"output_dir={tmp_path}/run")
    run(config_of(*config))
    content = parts.read_text()
    parts.write_text(content.replace("[[0, 3,", "[[3, 0,"))
    assert parts.read_text() != content
    with pytest.raises(UserError, match="resume: the data"):
        run(config_of(*config, "resume=latest"))


def test_a_finished_job_with_other_data_is_not_taken_for_the_same(tmp_path, call_command):
    yamls = tmp_path / "yamls" / "experiment"
    yamls.mkdir(parents=True)
    (yamls / "mine.yaml").write_text("# @package _global_\nnum_clients: 3\ngrid:\n  seed: [0, 1]\n")
    images(tmp_path / "x.npz")
    line = ("-m", f"--config-dir={tmp_path}/yamls", "experiment=mine", *(o for o in OWN if "num_clients" not in o))
    line += (f"dataset.path={tmp_path}/x.npz", "num_rounds=1", f"output_dir={tmp_path}/sweep", "tracker=none")
    assert call_command(*line).returncode == 0
    again = call_command(*line)
    assert (again.returncode, "2 of them finished already" in again.stdout) == (0, True)
    images(tmp_path / "x.npz", shift=1)
    other = call_command(*line)
    assert other.returncode == 2
    assert other.stderr.startswith("error: job ")
    assert len(other.stderr.splitlines()) == 1
    assert Path(tmp_path / "sweep").exists()


def weights(path, seed):
    made = run(config_of(*OWN[:-2], "dataset=digits", f"seed={seed}", "num_rounds=1", f"output_dir={path.parent}/of{seed}"))
    shutil.copy(Path(made["folder"]) / "model.safetensors", path)


@pytest.mark.parametrize("key", ["model.pretrained", "init_from"])
def test_a_run_is_not_resumed_with_other_initial_weights(tmp_path, key):
    file = tmp_path / "start.safetensors"
    weights(file, 5)
    config = (
        *OWN[:-2],
        "dataset=digits",
        "model.freeze=[encoder.*]" if key == "model.pretrained" else "seed=1",
        f"{key}={file}",
    )
    config += ("num_rounds=2", "checkpoint_every=1", f"output_dir={tmp_path}/run")
    first, content = run(config_of(*config)), file.read_bytes()
    weights(file, 6)
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    with pytest.raises(UserError) as found:
        run(config_of(*config, "resume=latest"))
    assert found.value.key == "resume"
    assert key in str(found.value)
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == before
    file.write_bytes(content)
    assert run(config_of(*config, "resume=latest"))["weights_fingerprint"] == first["weights_fingerprint"]
    assert list(first["weights_fingerprint"]) == [key]


def test_a_run_without_files_of_weights_has_no_entry_of_them(tmp_path):
    images(tmp_path / "x.npz")
    config = (*OWN, f"dataset.path={tmp_path}/x.npz", "checkpoint_every=1", f"output_dir={tmp_path}/run")
    assert "weights_fingerprint" not in run(config_of(*config))
    for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*/state.json"):  # of before there were any
        content = json.loads(path.read_text())
        assert content.pop("weights") == {}
        del content["sha256"]
        path.write_text(json.dumps({"sha256": checkpoint._digest(content), **content}))
    assert run(config_of(*config, "resume=latest"))["status"] == "finished"


def test_a_finished_job_with_other_initial_weights_is_not_taken_for_the_same(tmp_path, call_command):
    yamls = tmp_path / "yamls" / "experiment"
    yamls.mkdir(parents=True)
    (yamls / "mine.yaml").write_text("# @package _global_\nnum_clients: 3\ngrid:\n  seed: [0]\n")
    weights(tmp_path / "start.safetensors", 5)
    line = ("-m", f"--config-dir={tmp_path}/yamls", "experiment=mine", *(o for o in OWN[:-2] if "num_clients" not in o))
    line += (f"init_from={tmp_path}/start.safetensors", "num_rounds=1", f"output_dir={tmp_path}/sweep", "tracker=none")
    assert call_command(*line).returncode == 0
    assert "1 of them finished already" in call_command(*line).stdout
    weights(tmp_path / "start.safetensors", 6)
    other = call_command(*line)
    assert (other.returncode, len(other.stderr.splitlines())) == (2, 1)
    assert "init_from" in other.stderr


@pytest.mark.parametrize("surroundings", ["double", "no grad", "inference"])
def test_a_notebooks_defaults_change_no_run_and_are_restored(tmp_path, surroundings):
    import contextlib

    import torch

    images(tmp_path / "x.npz")
    config = (*OWN, f"dataset.path={tmp_path}/x.npz", "num_rounds=2", "tracker=none")
    run(config_of(*config, f"output_dir={tmp_path}/plain"))
    modes = {"no grad": torch.no_grad, "inference": torch.inference_mode}
    try:
        torch.set_default_dtype(torch.float64 if surroundings == "double" else torch.float32)
        with modes.get(surroundings, contextlib.nullcontext)():
            run(config_of(*config, f"output_dir={tmp_path}/other"))
            assert torch.is_grad_enabled() == (surroundings == "double")
        assert torch.get_default_dtype() == (torch.float64 if surroundings == "double" else torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert equal(outcome(tmp_path / "other"), outcome(tmp_path / "plain"))
