"""A loss of power while a checkpoint is saved: after every file operation the last valid one is found complete."""

import contextlib
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import same

from contrafed.client_app.files import Moment, StateDir
from contrafed.runs import checkpoint
from contrafed.runs.output import LOGS

KEEP_LATEST = {"checkpoint_keep": 1}


class Disk:
    """The possible contents of a disk that loses power now, of the files below a folder.

    A file's content is there after the file was synced, and its name after the folder was. A disk may have written more than
    that. Hence there are four pictures.

    * All of it.
    * What was synced alone.
    * Every name, with the synced content of the files.
    * The synced names, with all content of the files.
    """

    def __init__(self, folder):
        self.folder = folder
        self.contents, self.names = {}, {}  # by inode, as synced: bytes of files, {name: inode} of folders
        for path in [folder, *folder.rglob("*")]:
            self.sync(path)

    def sync(self, path):
        number = path.stat().st_ino
        if path.is_dir():
            self.names[number] = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(path)}
        else:
            self.contents[number] = path.read_bytes()

    def pictures(self, target):
        """Write the four pictures below ``target``, and return their folders."""
        now = {path.stat().st_ino: path for path in self.folder.rglob("*")}
        contents = {number: path.read_bytes() for number, path in now.items() if path.is_file()}
        names = {n: {e.name: (e.inode(), e.is_dir()) for e in os.scandir(path)} for n, path in now.items() if path.is_dir()}
        top = self.folder.stat().st_ino
        names[top] = {entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(self.folder)}
        kinds = [(names, contents), (self.names, self.contents), (names, self.contents), (self.names, self.contents | contents)]
        for i, (these, those) in enumerate(kinds):
            self._draw(target / str(i), top, these, those)
        return [target / str(i) for i in range(len(kinds))]

    def _draw(self, place, number, names, contents):
        place.mkdir(parents=True)
        for name, (inner, is_folder) in names.get(number, {}).items():
            if is_folder:
                self._draw(place / name, inner, names, contents)
            else:
                (place / name).write_bytes(contents.get(inner, b""))


@contextlib.contextmanager
def watch_disk(monkeypatch, disk, look):
    """Call ``look`` after every file operation in a block, except those of ``look`` itself."""
    busy = []

    def after():
        if not busy:
            busy.append(True)
            look()
            busy.clear()

    def operation(function):
        def done(*arguments, **options):
            result = function(*arguments, **options)
            if function is fsync and not busy:
                disk.sync(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            after()
            return result

        return done

    class File(io.FileIO):
        def write(self, data):
            written = super().write(data)
            after()
            return written

        def truncate(self, size=None):
            found = super().truncate(size)
            after()
            return found

    def open_watched(path, mode="r", *rest, **options):
        if mode not in ("wb", "r+b"):
            return real(path, mode, *rest, **options)
        file = File(path, mode.replace("b", ""))
        after()
        return file

    def write_text(path, text, encoding):
        with open_watched(path, "wb") as file:
            file.write(text.encode(encoding))

    real, fsync = open, os.fsync
    with monkeypatch.context() as patch:
        for module, name in (
            (os, "replace"),
            (os, "unlink"),
            (os, "rmdir"),
            (os, "mkdir"),
            (os, "fsync"),
            (shutil, "copyfile"),
        ):
            patch.setattr(module, name, operation(getattr(module, name)))
        patch.setattr("builtins.open", open_watched)
        patch.setattr(Path, "write_text", write_text)
        yield


def value(t):
    """Return the states of two of three clients after round ``t``, always of one size."""
    return {client: {"a": torch.full((40,), float(10 * t + client))} for client in ((0, 1), (1, 2), (0, 2))[t % 3]}


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="which file a handle is of is read from /proc")


def test_after_every_operation_of_saving_the_last_good_checkpoint_is_found(tmp_path, monkeypatch):
    run, expected, seen, looks = tmp_path / "disk" / "run", {0: ({}, {})}, set(), []
    run.mkdir(parents=True)
    keeper, good = checkpoint.Checkpoints(run, KEEP_LATEST, None), 0
    for name in LOGS:
        (run / f"{name}.csv").write_text("header\n")
    disk = Disk(tmp_path / "disk")

    def look():
        looks.append(good)
        for place in disk.pictures(tmp_path / "pictures"):
            found = checkpoint.find(place / "run")
            t = found.server_round if found else 0
            assert t in (good, good + 1), place
            seen.add(t)
            if found is not None:
                checkpoint.check_logs(found)
                model, state = found.server()
                assert same(model, expected[t][0])
                assert state["t"].tolist() == [t]
                client_states = dict(found.client_states())
                assert client_states.keys() == expected[t][1].keys()
                assert all(same(client_states[client], kept) for client, kept in expected[t][1].items())
        shutil.rmtree(tmp_path / "pictures")

    for t in (1, 2, 3, 4):
        for name in LOGS:
            with open(run / f"{name}.csv", "a") as log:
                log.write(f"{t},row\n")
        logs = {name: (run / f"{name}.csv").stat().st_size for name in LOGS}
        expected[t] = ({"w": torch.full((30,), float(t))}, expected[t - 1][1] | value(t))
        with watch_disk(monkeypatch, disk, look):
            keeper.save(t, expected[t][0], {"t": np.array([t])}, value(t), logs)
            keeper.wait()
        good = t
    with watch_disk(monkeypatch, disk, look):
        keeper.close()
    assert seen == {0, 1, 2, 3, 4}
    assert len(looks) > 80


def test_after_every_operation_of_a_client_its_memory_is_the_old_or_the_new_one(tmp_path, monkeypatch):
    """At every moment it can also return to its state at the checkpoint of round 2."""
    state, seen = StateDir(tmp_path / "disk", "1", 0, "pmfl"), set()
    (tmp_path / "disk" / "client_state").mkdir(parents=True)
    write = lambda t, last: state.write({"a": torch.full((9,), float(t))}, Moment("1", t, {}, last))  # noqa: E731
    for t in (1, 2):
        write(t, 0)
    disk = Disk(tmp_path / "disk")

    def look():
        for place in disk.pictures(tmp_path / "pictures"):
            there = StateDir(place, "1", 0, "pmfl")
            seen.add(float(there.read(Moment("1", 9, {}, 2, known=2))["a"][0]))
            assert there.read(Moment("2", 3, {"1": 2}, 2, known=2))["a"][0] == 2
        shutil.rmtree(tmp_path / "pictures")

    with watch_disk(monkeypatch, disk, look):
        for t in (3, 4):
            write(t, 2)
    assert seen == {2, 3, 4}
