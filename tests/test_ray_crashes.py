"""Killed Ray workers in training, in evaluation, between rounds, or for lack of memory: the numbers stay. Lost machines."""

import json
import os
import signal
from types import SimpleNamespace

import pytest
from tiny import HALF_AVAILABLE, TINY_RUN, equals_local, run_tiny, tiny_workspace, train_message

import contrafed.engines.ray
from contrafed.core.errors import RunStopped, UserError
from contrafed.engines import ray_liveness
from contrafed.engines.ray_worker import BatchJob, unpack_messages
from contrafed.engines.worker import BatchRunner, identify
from contrafed.runs.run import compose, run

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


ON_RAY = ("engine=ray", "engine.workers=2", "strategy=fedcrl")


class Stopped(contrafed.engines.ray.Worker):
    """A worker that stops itself at its first message, once in a run."""

    folder = ""

    def _results(self, records, batch, *states):
        try:
            os.close(os.open(f"{self.folder}/stopped", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return super()._results(records, batch, *states)
        os.kill(os.getpid(), signal.SIGSTOP)
        return super()._results(records, batch, *states)


@pytest.fixture
def stopping(tmp_path, monkeypatch, use_worker):
    monkeypatch.setattr(Stopped, "folder", str(tmp_path))
    use_worker(Stopped)
    return tmp_path / "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [[], ["engine.round_timeout=600"]])
def test_a_stopped_worker_is_replaced(tmp_path, local_runs, monkeypatch, stopping, timeout):
    monkeypatch.setattr(ray_liveness, "MAX_SILENT_SECONDS", 3 * ray_liveness.BEAT_SECONDS)
    found = run_tiny(tmp_path / "run", *ON_RAY, *timeout)
    assert stopping.exists()
    equals_local(found, local_runs("fedcrl"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ray_liveness.VITAL_PROCESSES)
def test_a_run_whose_ray_was_killed_ends_in_one_line_and_resumes(tmp_path, local_runs, name):
    from ray._private import worker

    def kill(server_round, values):
        if server_round == 2:
            (about,) = worker._global_node.all_processes[name]
            os.kill(about.process.pid, signal.SIGKILL)

    overrides = (*TINY_RUN, *HALF_AVAILABLE, *ON_RAY, "checkpoint_every=1", f"output_dir={tmp_path}/run")
    with pytest.raises(RunStopped) as stopped:
        run(compose(*overrides), on_round=kill)
    assert name in str(stopped.value)
    assert "\n" not in str(stopped.value)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert worker._global_node is None  # the next run starts another
    assert run(compose(*overrides, "resume=latest"), unique=False)["resumed_from"].endswith(("000001", "000002"))
    model, metrics, clients = local_runs("fedcrl")[1:]
    assert (tmp_path / "run" / "metrics.csv").read_bytes() == metrics
    assert (tmp_path / "run" / "clients.csv").read_bytes() == clients


def test_a_worker_is_silent_once_its_heartbeat_is_old(monkeypatch):
    beats, now = {"a": b"[1]"}, [1000.0]
    worker = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "a"))
    monkeypatch.setattr(ray_liveness, "_read", beats.get)
    monkeypatch.setattr(ray_liveness, "time", SimpleNamespace(monotonic=lambda: now[0]))
    heartbeats = ray_liveness.Heartbeats()
    for _ in range(3):
        assert not heartbeats.is_silent(worker)  # also at the first look after a long time
        now[0] += ray_liveness.MAX_SILENT_SECONDS
        beats["a"] += b"1"
    beats.clear()
    assert not heartbeats.is_silent(worker)
    now[0] += ray_liveness.MAX_SILENT_SECONDS - 1
    assert not heartbeats.is_silent(worker)
    now[0] += 1
    assert heartbeats.is_silent(worker)


def test_only_rays_vital_processes_end_a_run(monkeypatch):
    monkeypatch.setattr(ray_liveness, "find_dead_processes", list)
    with pytest.raises(ValueError, match="mine"), ray_liveness.report_dead_ray():
        raise ValueError("mine")
    dead = []
    monkeypatch.setattr(ray_liveness, "find_dead_processes", lambda: dead)
    with pytest.raises(RunStopped) as stopped, ray_liveness.report_dead_ray():
        dead.append("raylet")
        raise OSError("broken pipe")
    assert isinstance(stopped.value.__cause__, OSError)


@pytest.fixture
def machines(monkeypatch):
    """Let Ray have two machines. Return the list, in which a test changes what lives."""
    import ray

    found = [{"NodeID": name, "Alive": True} for name in ("one", "two")]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    monkeypatch.setattr(ray_liveness, "find_dead_processes", list)
    return found


def test_a_users_mistake_is_reported_although_a_machine_is_gone(machines):
    known = ray_liveness.find_machines()
    machines[1]["Alive"] = False
    with pytest.raises(UserError, match="own"), ray_liveness.report_dead_ray(known):
        raise UserError("own")


def test_a_machine_that_is_gone_ends_a_run_and_one_that_joins_does_not(machines, expect_error):
    known = ray_liveness.find_machines()
    machines.append({"NodeID": "three", "Alive": True})
    ray_liveness.check_ray(machines=known)
    machines[2]["Alive"] = False
    ray_liveness.check_ray(machines=known)
    machines[1]["Alive"] = False
    with expect_error("engine", RunStopped):
        ray_liveness.check_ray(machines=known)
    machines[1] = {"NodeID": "its new id", "Alive": True}
    with pytest.raises(RunStopped), ray_liveness.report_dead_ray(known):
        raise ValueError("what came of it")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("of_worker", [False, True])
def test_lost_objects_end_a_run_in_one_line(machines, expect_error, count, of_worker):
    """A worker's error is of its own class and of Ray's, with a traceback as its text."""
    import ray

    lost = ray.exceptions.ObjectReconstructionFailedError("00", None, "", 0)
    if of_worker:
        lost = ray.exceptions.RayTaskError("run", "Traceback\n...", ray_liveness.StateLost("lost")).as_instanceof_cause()
    del machines[count:]
    with expect_error("engine", RunStopped) as stopped, ray_liveness.report_dead_ray(ray_liveness.find_machines()):
        raise lost
    assert stopped.value.__cause__ is lost


def test_a_state_that_ray_lost_is_no_fault_of_the_client(monkeypatch):
    """Else the client would fail in every round, and the run would go on."""
    import ray

    identify()
    workspace = tiny_workspace("strategy=pmfl")[1]
    message = train_message(workspace, "{}")

    def get(ref):
        raise ray.exceptions.ObjectLostError("00", None, "")

    monkeypatch.setattr(ray, "get", get)
    worker = object.__new__(contrafed.engines.ray.Worker)
    worker.runner, worker.fetching = BatchRunner(6, 1), 0.0
    records, (rest,) = unpack_messages([message])
    with pytest.raises(ray_liveness.StateLost):
        worker._results(records, BatchJob([rest], None, None, None), ["a reference"], [None])


@pytest.mark.parametrize("failing", ["silent", "dead"])
def test_a_dispatch_asks_for_the_machines_when_a_worker_does_not_answer(monkeypatch, machines, failing):
    import ray

    identify()
    message, replaced = train_message(tiny_workspace("strategy=fedavg")[1], "{}"), []

    class Grid(SimpleNamespace):
        near, workers, stateful, stack_size, whole_stacks = [False], [None], False, 1, True
        machines, pace = ray_liveness.find_machines(), {}
        pool = SimpleNamespace(take=lambda rows: None)

        def replace(self, worker):
            replaced.append(worker)

    def get(ref):
        raise ray.exceptions.ActorDiedError

    def submit(dispatch, worker, rows):
        dispatch.pending["reference"] = contrafed.engines.ray._Batch(worker, rows, [], None)

    monkeypatch.setattr(contrafed.engines.ray._Dispatch, "_submit", submit)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs if failing == "dead" else [], []))
    monkeypatch.setattr(ray, "get", get)
    machines[1]["Alive"] = False
    with pytest.raises(RunStopped, match="a machine of the cluster is gone"):
        contrafed.engines.ray._Dispatch(Grid(ray=ray), [message], None).run()
    assert replaced == []
