"""Killed Ray workers in training, in evaluation, between rounds, or for lack of memory: the numbers stay."""

import os
import signal

import pytest
from tiny import equals_local, run_tiny

import contrafed.engines.ray

KILLS = 3  # in each run


class Doomed(contrafed.engines.ray.Worker):
    """A worker that gets SIGKILL before or after its work on a message of one kind, ``KILLS`` times in all."""

    kind, moment, folder = "train", "before", ""

    def _results(self, records, batch, *states):
        if self.moment == "before":
            self._meet(batch)
        done = super()._results(records, batch, *states)
        if self.moment == "after":
            self._meet(batch)
        return done

    def _meet(self, batch):
        if batch.messages[0][0].message_type != self.kind:
            return
        for number in range(KILLS):
            try:
                os.close(os.open(f"{self.folder}/{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

    def pid(self):
        return os.getpid()


@pytest.fixture
def kill_folder(tmp_path, monkeypatch, use_worker):
    (tmp_path / "kills").mkdir()
    monkeypatch.setattr(Doomed, "folder", str(tmp_path / "kills"))
    use_worker(Doomed)
    return tmp_path / "kills"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_sigkill_of_a_worker_at_work(tmp_path, local_runs, monkeypatch, kill_folder, kind, moment):
    monkeypatch.setattr(Doomed, "kind", kind)
    monkeypatch.setattr(Doomed, "moment", moment)
    found = run_tiny(tmp_path / "run", "strategy=fedcrl", "engine=ray", "engine.workers=2")
    assert len(list(kill_folder.iterdir())) == KILLS
    equals_local(found, local_runs("fedcrl"))


@pytest.mark.slow
def test_sigkill_of_a_worker_between_rounds(tmp_path, local_runs, monkeypatch, kill_folder):
    import ray

    killed, original = [], contrafed.engines.ray.RayGrid.execute
    monkeypatch.setattr(Doomed, "kind", "none")

    def execute(grid, messages, timeout):
        replies = original(grid, messages, timeout)
        if len(killed) < KILLS:
            killed.append(ray.get(grid.workers[len(killed) % 2].pid.remote()))
            os.kill(killed[-1], signal.SIGKILL)
        return replies

    monkeypatch.setattr(contrafed.engines.ray.RayGrid, "execute", execute)
    found = run_tiny(tmp_path / "run", "strategy=fedcrl", "engine=ray", "engine.workers=2")
    assert len(set(killed)) == KILLS
    equals_local(found, local_runs("fedcrl"))


@pytest.mark.slow
def test_a_worker_that_ray_ends_for_want_of_memory(tmp_path, local_runs, monkeypatch):
    """The kernel's killer is SIGKILL, above. Ray's monitor kills and reports it with a separate error."""
    import ray

    told, get = [], ray.get

    def out_of_memory(refs, **options):
        found = get(refs, **options)
        if len(told) < KILLS and isinstance(refs, ray.ObjectRef):  # a worker's answer to a batch
            told.append(refs)
            raise ray.exceptions.OutOfMemoryError("killed by the memory monitor")
        return found

    monkeypatch.setattr(ray, "get", out_of_memory)
    found = run_tiny(tmp_path / "run", "strategy=fedavg", "engine=ray", "engine.workers=2")
    assert len(told) == KILLS
    equals_local(found, local_runs("fedavg"))
