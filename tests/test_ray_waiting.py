"""Ray workers that wait for what other programs of the cluster use."""

import logging
from types import SimpleNamespace

import pytest
from tiny import equals_local, run_tiny

import contrafed.engines.ray
from contrafed.engines import ray_liveness, ray_waiting


def make_worker(pid):
    """Return a worker with the number of its process, 0 for one without."""
    worker = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: pid))
    worker.ready = SimpleNamespace(remote=lambda address: worker)
    return worker


@pytest.fixture
def cluster(monkeypatch):
    """Let Ray have no cluster but ``free``, and answer after ``late`` looks."""
    import ray
    from ray._private import state

    found = SimpleNamespace(free={}, late=1000, looks=0)

    def get(refs, timeout):
        found.looks += 1
        if found.looks <= found.late:
            raise ray.exceptions.GetTimeoutError
        return ["ready" for _ in refs]

    monkeypatch.setattr(ray_liveness, "find_dead_processes", list)
    monkeypatch.setattr(state, "available_resources_per_node", lambda: found.free)
    monkeypatch.setattr(state, "actors", lambda pid: {"Pid": pid})
    monkeypatch.setattr(ray, "get", get)
    return found


@pytest.mark.parametrize(
    ("pids", "free", "lacking"),
    [
        ([0, 0], {}, 2),
        ([0, 0], {"a": {"CPU": 3.0, "GPU": 1.0}}, 1),
        ([0, 0], {"a": {"CPU": 3.0, "GPU": 1.0}, "b": {"CPU": 1.0, "GPU": 1.0}}, 1),  # four CPUs, but not two and two
        ([7, 0], {"a": {"CPU": 1.5}}, 1),
        ([0, 0], {"a": {"CPU": 4.0, "GPU": 2.0}}, 0),
        ([7, 8], {}, 0),  # they start slowly
    ],
)
def test_only_workers_without_a_process_lack_something(cluster, pids, free, lacking):
    cluster.free = free
    assert ray_waiting.count_lacking([make_worker(pid) for pid in pids], {"CPU": 2, "GPU": 0.5}) == lacking


@pytest.mark.parametrize(
    ("pids", "late", "said"),
    [
        ([0], 1, ""),  # at one look only: its process has not begun
        ([7], 9, ""),
        ([0], 9, "waiting: no machine has 1 CPU free for 1 of 1 workers\n"),
        ([0, 0, 7], 9, "waiting: no machine has 1 CPU free for 2 of 3 workers. Fix: "),
    ],
)
def test_a_run_says_once_that_it_waits_for_other_programs(cluster, capsys, pids, late, said):
    cluster.late = late
    workers = [make_worker(pid) for pid in pids]
    about = ray_waiting.wait_for_workers(workers, None, {"CPU": 1, "GPU": 0}, frozenset())
    assert about == ["ready" for _ in pids]
    assert cluster.looks == late + 1
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    assert printed.count("\n") == bool(said)


@pytest.mark.slow
def test_a_run_that_waited_has_the_numbers_of_local(tmp_path, local_runs, monkeypatch, capsys):
    import ray

    class Busy:
        def wait(self):
            return None

    looks = []

    def look(workers, needs):
        looks.append(found := count_lacking(workers, needs))
        if len(looks) == 2:
            ray.kill(busy)
        return found

    count_lacking = ray_waiting.count_lacking
    monkeypatch.setattr(ray_waiting, "count_lacking", look)
    contrafed.engines.ray.stop_ray()
    try:
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        busy = ray.remote(num_cpus=1)(Busy).remote()
        ray.get(busy.wait.remote())
        found = run_tiny(tmp_path / "run", "strategy=fedavg", "engine=ray")
    finally:
        contrafed.engines.ray.stop_ray()
    assert looks == [1, 1]
    assert capsys.readouterr().out.count("waiting: no machine has 1 CPU free for 1 of 1 workers\n") == 1
    equals_local(found, local_runs("fedavg"))
