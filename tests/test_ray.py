"""Ray workers: their messages, workers that die, a cluster, GPUs."""

import logging
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import config_of, slow
from tiny import TINY_RUN, equals_local, run_tiny

import contrafed.engines.flower
import contrafed.engines.ray
import contrafed.engines.ray_start
import contrafed.engines.ray_worker
from contrafed.core.client_run import choose
from contrafed.core.errors import UserError
from contrafed.engines import shared_memory
from contrafed.engines.scheduling import schedule_balanced, schedule_guided
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs.run import run

# Also with every batch cut as far as it goes.
EACH_LEAST = pytest.mark.parametrize("least", [contrafed.engines.ray.MIN_BATCH_SECONDS, 0])


@pytest.mark.slow
def test_three_ray_workers_equal_local(tmp_path, local_runs, monkeypatch):
    monkeypatch.setattr(contrafed.engines.ray, "MIN_BATCH_SECONDS", 0)
    half = ("engine=ray", "engine.workers=3", "engine.cpus_per_worker=0.5")
    equals_local(run_tiny(tmp_path / "run", "strategy=pmfl", *half), local_runs("pmfl"))


@pytest.mark.slow
@pytest.mark.parametrize("far", ["all", "one"])
def test_workers_that_share_no_memory_with_the_driver_get_everything_through_ray(tmp_path, local_runs, monkeypatch, far):
    def reachable(grid, messages, timeout):
        grid.near = [worker > 0 and far == "one" for worker in range(len(grid.near))]
        return original(grid, messages, timeout)

    original = contrafed.engines.ray.RayGrid.execute
    if far == "all":
        monkeypatch.setattr(shared_memory, "limit", lambda: 0)  # as on a system without such memory
    else:
        monkeypatch.setattr(contrafed.engines.ray.RayGrid, "execute", reachable)
    equals_local(run_tiny(tmp_path / "run", "strategy=pmfl", "engine=ray", "engine.workers=2"), local_runs("pmfl"))


@pytest.mark.slow
def test_without_an_address_no_other_cluster_is_joined(tmp_path, monkeypatch):
    """A cluster that already runs on this machine, or in RAY_ADDRESS, has its own store and refuses another."""
    contrafed.engines.ray.stop_ray()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    run_tiny(tmp_path / "run", "strategy=fedavg", "engine=ray", "engine.workers=1", "num_rounds=1")


@pytest.mark.slow
@EACH_LEAST
def test_a_killed_worker_is_replaced_and_the_numbers_do_not_change(tmp_path, local_runs, monkeypatch, least):
    """Each of two workers dies before a round. Its messages run again, and PMFL's clients keep their state."""
    import ray

    monkeypatch.setattr(contrafed.engines.ray, "MIN_BATCH_SECONDS", least)
    killed = []
    original = contrafed.engines.ray.RayGrid.execute

    def execute(grid, messages, timeout):
        if grid.client_states and len(killed) < 2:
            killed.append(grid.workers[len(killed)])
            ray.kill(killed[-1])
        return original(grid, messages, timeout)

    monkeypatch.setattr(contrafed.engines.ray.RayGrid, "execute", execute)
    found = run_tiny(tmp_path / "run", "strategy=pmfl", "engine=ray", "engine.workers=2")
    assert len(killed) == 2
    equals_local(found, local_runs("pmfl"))


class Fragile(contrafed.engines.ray.Worker):
    """A worker that dies whenever it gets client 2."""

    def _results(self, records, batch, *states):
        if any(metadata.dst_node_id == FIRST_NODE_ID + 2 for metadata, _, _ in batch.messages):
            os._exit(1)
        return super()._results(records, batch, *states)


@pytest.mark.slow
@EACH_LEAST
def test_a_client_that_kills_its_worker_fails_alone(tmp_path, monkeypatch, capsys, use_worker, least):
    use_worker(Fragile)
    monkeypatch.setattr(contrafed.engines.ray, "MIN_BATCH_SECONDS", least)
    asked = ("strategy=fedavg", "participation=full", "engine=ray", "engine.workers=2", "eval_every=1000", "num_rounds=2")
    assert run(config_of(*TINY_RUN, *asked, f"output_dir={tmp_path / 'run'}"))["failures"] == 2
    metrics = (tmp_path / "run" / "metrics.csv").read_text()
    for server_round in (1, 2):
        assert f"{server_round},global,system,participants,6\n" in metrics
        assert f"{server_round},global,system,failures,1\n" in metrics
    said = [line for line in capsys.readouterr().out.splitlines() if "client 2:" in line]
    assert said
    assert "its worker died 3 times; the last time: " in said[0]


class Full(contrafed.engines.ray.Worker):
    """A worker whose GPU has no room for the images."""

    def __init__(self, *_):
        raise UserError("the images take 3 GB")


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why_in_one_line(tmp_path, use_worker):
    use_worker(Full)
    with pytest.raises(UserError, match=r"^the images take 3 GB$"):
        run_tiny(tmp_path / "run", "engine=ray", "engine.workers=1")


def test_batches_are_smaller_towards_the_end_and_hold_every_task_once():
    costs = [3.0, 50.0, 1.0, 2.0, 40.0, 8.0, 8.0, 8.0, 1.0, 1.0]
    batches = list(schedule_guided(costs, 2, 2.0))
    sums = [sum(costs[i] for i in batch) for batch in batches]
    assert sorted(i for batch in batches for i in batch) == list(range(10))
    assert batches[:2] == [[1], [4]]  # longer than their share, and so alone
    assert sums == sorted(sums, reverse=True)
    assert max(sums[-2:]) <= 3
    assert all(batch == sorted(batch) for batch in batches)


def test_a_short_round_is_one_batch_for_each_worker():
    costs = [1.0, 2.0, 3.0, 4.0]
    assert list(schedule_guided(costs, 2, 2.5)) == list(schedule_balanced(costs, 2)) == [[0, 3], [1, 2]]
    assert len(list(schedule_guided(costs, 2, 2.4))) > 2
    assert list(schedule_balanced([5.0], 3)) == [[0]]


def test_more_workers_than_ray_has_cores_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(UserError, match=r"engine.workers=500 needs 500 CPUs and 0 GPUs, Ray has \d+ and 0"):
        run_tiny(tmp_path / "run", "engine=ray", "engine.workers=500")


def test_a_worker_has_a_part_of_one_gpu():
    """Two GPUs fit two workers of 0.6, one per GPU, and three GPUs fit six of 0.4."""
    shares = ((2, 0.6), (3, 0.4), (4, 0.25), (2, 1.0))
    assert [contrafed.engines.ray.room(*share) for share in shares] == [2, 6, 16, 2]


def test_gpus_that_torch_cannot_use_do_not_keep_workers_from_the_cores(monkeypatch):
    config = choose("engine", config_of("engine=ray")["engine"]).config
    shares = {}
    for usable in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda usable=usable: usable)
        asked = (config, replace(config, address="auto"), replace(config, gpus_per_worker=0.5))
        shares[usable] = [contrafed.engines.ray.share_of(each, 2) for each in asked]
        assert contrafed.engines.ray.share_of(config, 0) == 0
    assert shares == {True: [1, 1, 0.5], False: [0, 1, 0.5]}  # a cluster's are not this machine's


@pytest.mark.parametrize(("share", "of_memory"), [(0.5, [0.45]), (1.0, []), (None, [])])
def test_workers_that_share_a_gpu_share_its_memory(monkeypatch, share, of_memory):
    import ray

    assigned = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 1.0} | ({} if share is None else {"GPU": share}))
    limits = []
    monkeypatch.setattr(ray, "get_runtime_context", lambda: assigned)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    contrafed.engines.ray_worker.keep_to_share()
    assert limits == of_memory


@pytest.mark.parametrize(("said", "ends"), [("CUDA error: device-side assert triggered", True), ("broken sensor", False)])
def test_a_worker_that_lost_its_gpu_ends(monkeypatch, said, ends):
    def run(*_):
        raise RuntimeError(said)

    worker, ended = contrafed.engines.ray_worker.Worker.__new__(contrafed.engines.ray_worker.Worker), []
    worker.runner = SimpleNamespace(run=run)
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(RuntimeError, match=said):
        worker._results([], contrafed.engines.ray_worker.BatchJob([], None, None, None), [], [])
    assert bool(ended) is ends


@pytest.mark.parametrize("engine", ["ray engine.gpus_per_worker=0", slow("flower")])
def test_a_run_whose_clients_have_no_gpu_evaluates_without_one(tmp_path, monkeypatch, engine):
    """Otherwise its summary would name a GPU that trained nothing."""
    module, made = getattr(contrafed.engines, engine.split()[0]), []

    def workspace(run, *, device, federation, model):
        made.append(device)
        raise UserError("far enough")

    monkeypatch.setattr(module, "default_device", lambda: "cuda")
    monkeypatch.setattr(module, "Workspace", workspace)
    monkeypatch.setattr(contrafed.engines.ray, "start_ray", lambda *_: None)
    monkeypatch.setattr(contrafed.engines.flower, "_check_resources", lambda _: None)
    with pytest.raises(UserError, match="far enough"):
        run(config_of(*TINY_RUN, *f"engine={engine}".split(), f"output_dir={tmp_path / 'run'}"))
    assert made == ["cpu"]


@pytest.mark.parametrize(("share", "fits"), [(0.5, True), (1.0, True), (0.0, True), (0.4, False)])
def test_flowers_simulation_takes_no_part_of_gpus_that_it_would_wait_for(monkeypatch, share, fits):
    import ray

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 5.0, "GPU": 2.0})
    config = contrafed.engines.flower.Config(1.0, share, None, None, None)
    if fits:
        contrafed.engines.flower._check_resources(config)
    else:
        with pytest.raises(UserError, match=f"engine.gpus_per_client={share:g}: "):
            contrafed.engines.flower._check_resources(config)


def test_another_address_is_another_ray(monkeypatch):
    import ray

    asked = []
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(asked))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.append(address))
    monkeypatch.setattr(contrafed.engines.ray_start.ray_access, "check_loopback", lambda about: None)
    monkeypatch.setattr(contrafed.engines.ray_start, "_started", None)
    for address in (None, None, "auto", "auto", None):
        contrafed.engines.ray.start_ray(address, False, None, None)
    assert asked == ["local", "auto", "local"]
    monkeypatch.setattr(contrafed.engines.ray_start, "_started", None)  # the user's own
    contrafed.engines.ray.start_ray("auto", False, None, None)
    assert asked == ["local", "auto", "local"]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "said"), [(("cpus_per_client=500",), "500"), (("gpus_per_client=1",), "1")])
def test_a_client_that_has_no_room_in_flowers_simulation_is_refused(tmp_path, options, said):
    with pytest.raises(UserError, match=rf"engine.[cg]pus_per_client={said} is more than the \d+ [CG]PUs that Ray has"):
        run_tiny(tmp_path / "run", "engine=flower", *(f"engine.{option}" for option in options))


def test_ray_that_cannot_start_is_one_line(tmp_path):
    contrafed.engines.ray.stop_ray()
    with pytest.raises(UserError, match="engine=ray: Ray does not start"):
        run_tiny(tmp_path / "run", "engine=ray", "engine.address=nowhere")
    assert not (tmp_path / "run").exists()


class Pinned(contrafed.engines.ray_worker.Worker):
    """A worker that reports its GPU."""

    def gpu(self):
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.slow
def test_workers_have_a_gpu_each_and_the_numbers_are_those_of_local(tmp_path, local_runs, monkeypatch, use_worker):
    """Ray is configured with two GPUs that do not exist. It pins one to each worker, and torch trains on the CPU."""
    import ray

    seen = []
    original = contrafed.engines.ray.RayGrid.execute

    def execute(grid, messages, timeout):
        seen.append(ray.get([worker.gpu.remote() for worker in grid.workers]))
        return original(grid, messages, timeout)

    monkeypatch.setattr(contrafed.engines.ray.RayGrid, "execute", execute)
    use_worker(Pinned)
    contrafed.engines.ray.stop_ray()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "98,99")  # nor are these where there are GPUs
    asked = ("engine=ray", "engine.gpus_per_worker=1")  # torch cannot use them
    try:
        ray.init("local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        found = run_tiny(tmp_path / "run", "strategy=pmfl", *asked)
        with pytest.raises(UserError, match=r"engine.workers=3 needs 3 CPUs and 3 GPUs, Ray has 2 and 2"):
            run_tiny(tmp_path / "three", *asked, "engine.workers=3")
    finally:
        contrafed.engines.ray.stop_ray()
    assert {tuple(sorted(gpus)) for gpus in seen} == {("98", "99")}
    equals_local(found, local_runs("pmfl"))
