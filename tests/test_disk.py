"""A full, read-only or slow disk: one clear line, an intact last checkpoint, and a non-zero exit status."""

import contextlib
import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import config_of, same, slow
from messages import ROOT
from safetensors.torch import load_file
from stopped import SMALL_RUN, equal, outcome
from wire import RUN, Wire, plain, rows_of, run_devices

import contrafed.core.tensors
import contrafed.runs.checkpoint
from contrafed.client_app.files import Moment, StateDir
from contrafed.core.disk import copy_private, told_in_one_line
from contrafed.core.errors import DiskError
from contrafed.runs import checkpoint
from contrafed.runs.output import RoundLog, RunRecorder
from contrafed.runs.run import run


@contextlib.contextmanager
def small_disk(folder, kilobytes):
    """Mount an in-memory disk of so many kilobytes at ``folder``. Skip the test if this process may not."""
    folder.mkdir()
    wanted = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(wanted, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """Fill a disk."""
    with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def command(*overrides):
    """Run the command line on a small run, in its own process."""
    words = [sys.executable, "main.py", "strategy=pmfl", *SMALL_RUN, *overrides]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)


def one_line(found, says):
    """Assert that a command failed with one line that names the cause, and with nothing else."""
    assert found.returncode == 1, found.stderr
    assert re.fullmatch(rf"error: cannot write to .*{says}.*\n", found.stderr), found.stderr


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_a_run_in_one_line_and_it_goes_on_where_there_is_room(tmp_path, whole):
    with small_disk(tmp_path / "disk", 400) as disk:
        found = command("checkpoint_every=1", "checkpoint_keep=50", "num_rounds=7", f"output_dir={disk}/run")
        one_line(found, r"\(No space left on device\); resume=latest continues from round \d")
        kept = checkpoint.find(disk / "run")
        assert 1 <= kept.server_round < 7
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        small = ("strategy=pmfl", *SMALL_RUN, "resume=latest")
        run(config_of(*small, "checkpoint_every=1", "checkpoint_keep=50", f"output_dir={disk}/run"))
        assert equal(outcome(disk / "run"), whole)


def test_a_disk_that_became_read_only(tmp_path, whole):
    small = ("strategy=pmfl", *SMALL_RUN, "checkpoint_every=2")
    with small_disk(tmp_path / "disk", 4096) as disk:
        run(config_of(*small, f"output_dir={disk}/run"))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(DiskError, match=r"\(Read-only file system\); resume=latest continues from round 6"):
            run(config_of(*small, "resume=latest", f"output_dir={disk}/run"))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        run(config_of(*small, "resume=latest", f"output_dir={disk}/run"))
        assert equal(outcome(disk / "run"), whole)


def no_room(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_a_file(path, tensors, metadata=None, **options):
    """Write until the disk is full."""
    contrafed.core.tensors.write(path, tensors, metadata, **options)
    os.truncate(path, path.stat().st_size // 2)
    no_room()


# What fails once four rounds are over, and the checkpoint that is then the last good one.
PLACES = {
    "metrics": (RunRecorder, "flush", no_room, 4),
    "a checkpoint's tensors": (contrafed.runs.checkpoint, "write", half_a_file, 4),
    "a checkpoint's names": (contrafed.runs.checkpoint, "sync", no_room, 4),
    "the model": (RunRecorder, "save_model", no_room, 6),
}


@pytest.mark.parametrize(
    "place", [place if place in ("a checkpoint's tensors", "the model") else slow(place) for place in PLACES]
)
def test_wherever_the_disk_fails_the_last_checkpoint_is_whole(tmp_path, monkeypatch, whole, place):
    module, name, fault, good = PLACES[place]
    small = ("strategy=pmfl", *SMALL_RUN, "checkpoint_every=2", f"output_dir={tmp_path}/run")
    with monkeypatch.context() as patch:
        write = RoundLog.write

        def after_round_4(self, done):
            if done.server_round == 5:
                while not (tmp_path / "run" / "checkpoints" / "000004").exists():  # written while rounds run
                    time.sleep(0.01)
                patch.setattr(module, name, fault)
            write(self, done)

        patch.setattr(RoundLog, "write", after_round_4)
        with pytest.raises(DiskError, match=rf"\(No space left on device\); resume=latest continues from round {good}"):
            run(config_of(*small))
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))  # what there is room for is given back
    run(config_of(*small, "resume=latest"))
    assert equal(outcome(tmp_path / "run"), whole)


def test_other_errors_are_not_the_disks(tmp_path):
    with pytest.raises(ConnectionRefusedError), told_in_one_line(tmp_path, lambda: ""):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")


def test_a_slow_disk_only_takes_time(tmp_path, monkeypatch, whole):
    """A checkpoint that takes longer than its rounds delays the next one, so that they do not fill the memory."""
    waiting, most = [], []

    def slow(*arguments, **options):
        waiting.append(1)
        most.append(len(waiting))
        time.sleep(0.1)
        contrafed.core.tensors.write(*arguments, **options)
        waiting.pop()

    flush = RunRecorder.flush
    monkeypatch.setattr(contrafed.runs.checkpoint, "write", slow)
    monkeypatch.setattr(RunRecorder, "flush", lambda self: (time.sleep(0.05), flush(self)))
    small = ("strategy=pmfl", *SMALL_RUN, "checkpoint_every=3", f"output_dir={tmp_path}/run")
    run(config_of(*small))
    assert equal(outcome(tmp_path / "run"), whole)
    assert max(most) == 1
    assert checkpoint.find(tmp_path / "run").server_round == 6


@pytest.mark.usefixtures("quick_devices")
def test_a_client_whose_disk_is_full_is_absent_and_keeps_what_it_remembered(tmp_path):
    """Client 1 has no room in round 2 and has again in round 3."""
    seen = {}

    def memory():
        return load_file(disk / "client_state" / f"{RUN}-1.safetensors")

    def change(k, message, reply):
        if k == 1 and message.metadata.message_type == "train":
            server_round = int(message.metadata.group_id)
            seen[server_round] = {name: value.clone() for name, value in memory().items()}
            if server_round == 1:
                fill(disk)
            else:
                (disk / "filler").unlink(missing_ok=True)
        return reply

    with small_disk(tmp_path / "disk", 256) as disk:
        clients = plain(**{"state-dir": f"{tmp_path}/state{{k}}"})
        clients[1]["state-dir"] = str(disk)
        _, metrics, _, summary = run_devices(tmp_path / "run", Wire(*clients, change=change), "strategy=pmfl")
        assert list((disk / "client_state").glob("*.part*")) == []
    assert rows_of(metrics, "failures") == {1: 0, 2: 1, 3: 0}
    assert summary["status"] == "finished"
    assert same(seen[1], seen[2])
    assert [int(seen[t]["participations"]) for t in (1, 2, 3)] == [1, 1, 2]
    assert "state_lost" not in metrics.decode()


def test_a_private_copy_is_private_while_it_is_written(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("secret")
    (tmp_path / "b").write_text("old")
    modes, copy = [], shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda a, b: (modes.append(b.stat().st_mode & 0o777), copy(a, b))[1])
    assert copy_private(tmp_path / "a", tmp_path / "b").read_text() == "secret"
    assert modes == [0o600]


def test_memory_that_cannot_be_written_leaves_the_old_one(tmp_path):
    state = StateDir(tmp_path, "1", 0, "pmfl")
    state.write({"a": torch.ones(2)}, Moment("1", 1))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limit[1]))
        with pytest.raises(OSError, match="File too large"):
            state.write({"a": torch.zeros(2000)}, Moment("1", 2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert same(state.read(Moment("1", 3)), {"a": torch.ones(2)})
    assert [path.name for path in (tmp_path / "client_state").iterdir()] == ["1-0.safetensors"]
