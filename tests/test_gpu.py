"""Properties of a real GPU: CONTRAFED_GPU=1 pytest -n 0 tests/test_gpu.py. No other test sees a GPU (conftest.py)."""

import gc

import pytest
import torch
from helpers import build_received, close, config_of, workspace_of
from recording import STACK_SIZE, settings_of, watch, write_problem
from test_every import METHODS
from tiny import run_tiny

from contrafed.core.tensors import on_host
from contrafed.engines.worker import BatchRunner
from contrafed.training.batches import Batches

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CONTRAFED_GPU=1 and a GPU that torch can use; docs/reproducibility.md"
)

CNN = ("num_clients=8", "model=cnn", "model.hidden=8", "strategy.local.iterations=null", "strategy.local.epochs=2")


def rounds(device, *overrides, dtype=torch.float64, clients=4):
    """Run two rounds of one stack, and return the clients' uploads of the second, and their metrics."""
    workspace = workspace_of(config_of(*CNN, *overrides), device=device, dtype=dtype)
    received = {name: value.to(dtype) for name, value in on_host(build_received(workspace)).items()}
    client_states = [{}] * clients
    for server_round in (1, 2):
        updates = workspace.client_class(workspace, range(clients), client_states).update([received] * clients, server_round)
        client_states = [update.client_state for update in updates]
    return [on_host(update.tensors) for update in updates], [update.metrics for update in updates]


@pytest.mark.parametrize("method", ["pmfl", "fedrcl", "fedcrl", "moon"])
def test_a_stack_in_double_precision_equals_the_cpu(method):
    (here, metrics), (there, others) = (rounds(device, f"strategy={method}") for device in ("cpu", "cuda"))
    for one, other in zip(here, there, strict=True):
        close(one, other, 1e-8)
    for one, other in zip(metrics, others, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_gpu(monkeypatch):
    original, watched = Batches.segments, []

    def segments(self):
        torch.cuda.set_sync_debug_mode("error")
        yield from original(self)
        torch.cuda.set_sync_debug_mode("default")
        watched.append(self)

    asked = ("cuda", "strategy=fedrcl", "model.dropout=0.1", "strategy.local.momentum=0.9")
    rounds(*asked, dtype=torch.float32)  # CUDA and its libraries start
    monkeypatch.setattr(Batches, "segments", segments)
    try:
        rounds(*asked, dtype=torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(watched) == 2


@pytest.mark.parametrize("clients", [1, 4])
def test_mixed_precision_is_near_single_precision(clients):
    """bfloat16 has two to three decimal digits."""
    plain, mixed = (
        rounds("cuda", "strategy=fedavg", f"strategy.local.mixed_precision={on}", dtype=torch.float32, clients=clients)
        for on in ("false", "true")
    )
    for one, other in zip(plain[1], mixed[1], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05)
    assert any(not torch.equal(plain[0][0][name], mixed[0][0][name]) for name in plain[0][0])


def test_a_run_on_a_gpu_goes_on_without_one(tmp_path):
    asked = ("strategy=fedavg", "strategy.local.momentum=0.9", "strategy.local.keep_optimizer=true", "engine=local")
    kept = ("checkpoint_every=1", "checkpoint_keep=3")
    whole = run_tiny(tmp_path / "whole", *asked, *kept, "engine.device=cuda")
    first = tmp_path / "whole" / "checkpoints" / "000001"
    goes_on = run_tiny(tmp_path / "on", *asked, f"resume={first}", "engine.device=cpu")
    assert [whole[0]["device"], goes_on[0]["device"]] == ["cuda", "cpu"]
    assert whole[0]["failures"] == goes_on[0]["failures"] == 0
    close(whole[1], goes_on[1], 1e-3)


@pytest.fixture
def single_precision():
    """Convolutions and products in float32, not TF32."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("method", METHODS)
def test_every_method_alone_and_stacked_equals_the_cpu(method, tmp_path):
    """Complete runs in double precision, including the strategy and the client states."""
    config = settings_of(method, write_problem(tmp_path))
    expected = watch(config)
    for stack_size in (1, STACK_SIZE):
        found = watch(config, device="cuda", stack_size=stack_size)
        for one, other in zip(found.models, expected.models, strict=True):
            close(on_host(one), other, 1e-8)
        for one, other in zip(found.client_states[-1].items(), expected.client_states[-1].items(), strict=True):
            assert one[0] == other[0]
            close(one[1], other[1], 1e-8)


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("method", ["fedavg", "pmfl", "moon"])
def test_a_run_in_single_precision_is_near_the_cpus(method, tmp_path):
    asked = (f"strategy={method}", "engine=local", "strategy.local.lr=0.05")
    here, there = (run_tiny(tmp_path / device, *asked, f"engine.device={device}") for device in ("cpu", "cuda"))
    assert there[0]["device"] == "cuda"
    close(here[1], there[1], 1e-4)


@pytest.mark.parametrize("workers", [1, 2])
def test_ray_workers_that_share_a_gpu_are_near_local(workers, tmp_path):
    asked = ("strategy=pmfl", "strategy.local.lr=0.05")
    on_ray = ("engine=ray", f"engine.workers={workers}", f"engine.gpus_per_worker={1 / workers}")
    one, other = (run_tiny(tmp_path / str(n), *asked, *engine) for n, engine in enumerate((("engine=local",), on_ray)))
    assert one[0]["device"] == other[0]["device"] == "cuda"
    assert one[0]["failures"] == other[0]["failures"] == 0
    close(one[1], other[1], 1e-4)


def test_two_runs_of_a_seed_are_near_each_other(tmp_path):
    one, other = (run_tiny(tmp_path / str(n), "strategy=pmfl", "engine=local", "model=cnn", "model.hidden=8") for n in range(2))
    close(one[1], other[1], 1e-4)


def test_a_stack_without_room_is_halved(tmp_path, monkeypatch):
    """The GPU's memory is limited to three quarters of what the full stack used."""
    sizes, cut = [], BatchRunner._cut
    monkeypatch.setattr(BatchRunner, "_cut", lambda self, *asked: sizes.append(self.stack_size) or cut(self, *asked))
    asked = ("strategy=fedavg", "engine=local", "model=cnn", "model.hidden=8192", "num_clients=40", "num_rounds=2")
    gc.collect()
    before, whole = torch.cuda.memory_allocated(), run_tiny(tmp_path / "whole", *asked)
    most = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_allocated() + 0.75 * (most - before)
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        halved = run_tiny(tmp_path / "halved", *asked)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert max(sizes) == 40
    assert min(sizes) < 20
    assert halved[0]["failures"] == whole[0]["failures"] == 0
    close(whole[1], halved[1], 1e-3)
