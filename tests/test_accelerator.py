"""All data stay on the accelerator that should: every method on a simulated one gives the CPU's numbers."""

import os
import re
import sys
from functools import cache

import numpy as np
import pytest
import torch
from accelerator import NAME, There, accelerator, crossings
from helpers import close, config_of, digits_run, same, slow, with_images, workspace_of
from tiny import equals_local, run_tiny
from wire import Wire, plain, run_devices

import contrafed.engines.ray
import contrafed.engines.ray_worker
import contrafed.training.workspace
from contrafed.clients.pmfl import PMFLClient
from contrafed.core import codec
from contrafed.core.client_run import choose
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.tensors import on_host
from contrafed.data.federation import Federation
from contrafed.data.partition import Partition
from contrafed.engines.client_state import ClientStateStore
from contrafed.report import embedding
from contrafed.runs.output import RunRecorder
from contrafed.training import local_round
from contrafed.training.errors import LocalError
from contrafed.training.workspace import uninstall

ON_ACCELERATOR = (f"engine.device={NAME}", "engine.memory_device_bytes=100000", "engine.memory_host_bytes=100000")
STACKED_RUN = ("engine=local", "engine.stack_size=4", "num_rounds=2")


@pytest.fixture(autouse=True)
def _alike(monkeypatch):
    """Evaluate as many examples at a time as on the CPU, for equal rounding of sums."""
    workspace = contrafed.training.workspace
    monkeypatch.setattr(workspace, "EVALUATION_BATCH_ELSEWHERE", workspace.EVALUATION_BATCH)


def both(folder, *overrides):
    """Return the results of ``run_tiny`` on the CPU and on the simulated accelerator."""
    here = run_tiny(folder / "here", *overrides)
    with accelerator():
        there = run_tiny(folder / "there", *overrides, *ON_ACCELERATOR)
    for summary in (here[0], there[0]):
        assert summary["failures"] == summary["replies_rejected"] == 0
    assert there[0]["device"] == NAME
    return here, there


def test_the_stand_in_computes_and_refuses_what_a_gpu_refuses():
    x = torch.arange(6.0).reshape(2, 3)
    with accelerator():
        y = x.to(NAME)
        assert isinstance(y + torch.tensor(1.0), There)
        assert torch.equal((y @ y.T).cpu(), x @ x.T)
        assert torch.equal(y[torch.tensor([1])].cpu(), x[1:])
        y[0].zero_()  # through a view
        assert y.tolist() == [[0, 0, 0], [3, 4, 5]]
        for meet in (lambda: y + x, lambda: torch.where(y > 0, y, x), lambda: torch.stack([y, x])):
            with pytest.raises(RuntimeError, match="on the CPU"):
                meet()
        with pytest.raises((RuntimeError, TypeError)):
            y.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pmfl", "fedrcl"])
def test_no_step_waits_for_the_accelerator(method):
    """A round of two epochs has as many transfers as one of one epoch, also with convolutions and dropout."""
    counts = []
    for epochs in (1, 2):
        local = ("strategy.local.iterations=null", f"strategy.local.epochs={epochs}", "strategy.local.batch_size=16")
        config = config_of(f"strategy={method}", *local, "num_clients=20", "model=cnn", "model.hidden=8", "model.dropout=0.1")
        with accelerator():
            workspace = workspace_of(config, device=NAME)
            down, _ = workspace.client_class.message_spec(workspace.model, workspace.config)
            initial = {f"model/{name}": value for name, value in workspace.initial.items()}
            received = [{name: initial.get(name, torch.zeros(shape)) for name, shape in down.items()}] * 3
            client_states = [{}] * 3
            for server_round in (1, 2):
                crossings.clear()
                updates = workspace.client_class(workspace, range(3), client_states).update(received, server_round)
                client_states = [update.client_state for update in updates]
        counts.append(len(crossings))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "options",
    [
        "strategy=pmfl strategy.local.augment=[rotation,crop,flip] strategy.threshold=client",
        slow("strategy=fedcrl strategy.tau_source=on_receipt strategy.local.momentum=0.9"),
        "strategy=fedprox strategy.local.optimizer=adam strategy.local.keep_optimizer=true log=[features,deviation]",
        slow("strategy=fedavg log=[features,deviation,weights] strategy.server=fedau"),
        slow("strategy=moon strategy.local.epochs=3 strategy.local.iterations=null strategy.local.clip_norm=1"),
    ],
)
def test_what_the_configuration_adds_stays_there_too(tmp_path, options):
    here, there = both(tmp_path, *STACKED_RUN, *options.split())
    assert same(here[1], there[1])
    assert here[2:] == there[2:]


def test_a_lone_client_on_an_accelerator_equals_the_cpu_up_to_rounding(tmp_path):
    small = ("model=cnn_pmfl", "model.channels=4", "engine=local", "engine.stack_size=1", "num_rounds=2")
    here, there = both(tmp_path, "strategy=pmfl", *small)
    for name, value in here[1].items():
        torch.testing.assert_close(there[1][name], value)


def test_a_stack_asks_each_frozen_model_once_a_round():
    """For all batches to compare: the received, the previous, five stored, newest first, and three new models."""
    config = config_of("strategy=pmfl", "num_clients=4", "model=mlp", "model.hidden=[8]", "strategy.local.batch_size=8")
    calls = []
    with accelerator():
        workspace = workspace_of(config, device=NAME)

        class Counted(workspace.client_class):
            def represent(self, params, x):
                calls.append(len(x))
                return super().represent(params, x)

        received, client_states = {f"model/{name}": value for name, value in workspace.initial.items()}, [{}] * 3
        for server_round in (1, 2):
            calls.clear()
            updates = Counted(workspace, range(3), client_states).update([received] * 3, server_round)
            client_states = [update.client_state for update in updates]
    # The model that all clients received processes all their images as one batch.
    assert calls == [3 * 40, 40, 40, 32, 24, 16, 8, 24, 16, 8]


@pytest.mark.parametrize("method", [slow("pmfl"), "fedcrl", slow("fedagm")])
def test_a_run_goes_on_there_as_if_it_had_never_stopped(tmp_path, method):
    asked = (*STACKED_RUN, *ON_ACCELERATOR, f"strategy={method}", "checkpoint_every=1", "checkpoint_keep=3")
    with accelerator():
        whole = run_tiny(tmp_path / "whole", *asked)
        goes_on = run_tiny(tmp_path / "on", *asked, f"resume={tmp_path / 'whole' / 'checkpoints' / '000001'}")
    assert same(whole[1], goes_on[1])
    assert whole[2:] == goes_on[2:]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pmfl", "fedcrl"])
def test_devices_with_an_accelerator_answer_as_others_do(tmp_path, monkeypatch, method):
    def clients(which):
        for k in range(3):
            (tmp_path / which / str(k)).mkdir(parents=True)
        return plain(**{"state-dir": tmp_path / which / "{k}"})

    here = run_devices(tmp_path / "out-here", Wire(*clients("here")), f"strategy={method}")
    uninstall()
    monkeypatch.setattr(contrafed.training.workspace, "default_device", lambda: NAME)
    with accelerator():
        there = run_devices(tmp_path / "out-there", Wire(*clients("there")), f"strategy={method}")
    uninstall()
    assert (there[-1]["device"], there[-1]["failures"]) == (NAME, 0)
    assert same(here[0], there[0])
    assert here[1:3] == there[1:3]


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
)  # fmt: skip
PLACES = ((local_round, "_open_stack"), (PMFLClient, "_prepare_contrast"), (PMFLClient, "make_upload"))
CASES = [(*place, error) for place in PLACES for error in OUT_OF_MEMORY]


@cache
def alone_on_digits():
    return digits_run("pmfl", 3, clients=8)[0][-1]


@pytest.mark.parametrize(("place", "where", "error"), [slow(*case) if n % 4 else case for n, case in enumerate(CASES)])
def test_a_stack_that_does_not_fit_is_halved_and_stays_so(monkeypatch, place, where, error):
    """With memory for three clients, a stack of eight is halved twice, in the first round only, with equal results."""
    tried, method = [], getattr(place, where)

    def small(client, *args):
        if where != "_prepare_contrast" or args[-1].number == 1:
            tried.append(len(client.clients))
            if len(client.clients) > 3:
                raise error
        return method(client, *args)

    monkeypatch.setattr(place, where, small)
    halved, strategy = digits_run("pmfl", 3, clients=8, stack_size=8)
    assert tried == [8, 4, *[2] * 12]
    assert not strategy.round.failures
    close(alone_on_digits(), halved[-1])


def test_a_stack_that_raises_is_halved_until_the_faulty_client_fails_alone(monkeypatch):
    tried, compared = [], PMFLClient._prepare_contrast

    def broken(self, history, now):
        if now.number == 0:
            tried.append(sorted(self.clients))
        if 2 in self.clients:
            raise RuntimeError("broken sensor")
        return compared(self, history, now)

    monkeypatch.setattr(PMFLClient, "_prepare_contrast", broken)
    _, strategy = digits_run("pmfl", 1, clients=8, stack_size=8, may_fail=True)
    (said,) = strategy.round.failures
    assert re.fullmatch(r"client 2, round 1, step 0: RuntimeError: broken sensor \(.*test_accelerator\.py, line \d+\)", said)
    assert [len(clients) for clients in tried if 2 in clients] == [8, 4, 2, 1]
    assert sorted(len(clients) for clients in tried if 2 not in clients) == [1, 2, 4]


def test_what_clients_remember_leaves_the_accelerator_stack_by_stack(monkeypatch):
    """It does not wait for the end of the round, when the stacks of a complete round would be in memory."""
    log, update, put = [], PMFLClient.update, ClientStateStore.store
    monkeypatch.setattr(PMFLClient, "update", lambda self, *args: (log.append(len(self.clients)), update(self, *args))[1])
    monkeypatch.setattr(ClientStateStore, "store", lambda self, *args: (log.append("put"), put(self, *args))[1])
    digits_run("pmfl", 1, clients=5, stack_size=2)
    assert log == [2, "put", "put", 2, "put", "put", 1, "put"]


def test_what_clients_remember_comes_from_the_host_as_a_stack():
    """A round has as many transfers for five clients as for three."""
    counts = []
    for clients in (3, 5):
        with accelerator():
            config = config_of("strategy=pmfl", "num_clients=20", "model=mlp", "model.hidden=[8]")
            workspace = workspace_of(config, device=NAME)
            received = [{f"model/{name}": value for name, value in workspace.initial.items()}] * clients
            updates = workspace.client_class(workspace, range(clients)).update(received, 1)
            client_states = [on_host(update.client_state) for update in updates]
            assert not any(isinstance(value, There) for memory in client_states for value in memory.values())
            crossings.clear()
            workspace.client_class(workspace, range(clients), client_states).update(received, 2)
        counts.append(len(crossings))
    assert counts[0] == counts[1] > 0


def test_what_leaves_the_accelerator_crosses_once_for_each_type(tmp_path):
    values = {"a": torch.randn(3, 2), "count": torch.tensor(5), "b": torch.randn(4), "c": torch.zeros(0, 7)}
    with accelerator():
        there = {name: value.to(NAME) for name, value in values.items()}
        crossings.clear()
        memory = ClientStateStore(0, 1000, str(tmp_path))
        memory.store(7, there)
        assert len(crossings) == 2
        make, parts = codec.reduce_record(codec.to_record(there))
        assert len(crossings) == 4
    for found in (memory.get(7), codec.from_record(make(*parts))):
        assert list(found) == list(values)
        assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in values.items())


def test_an_evaluation_takes_fewer_large_images_at_a_time():
    def batch(side, device):
        images = with_images(torch.zeros(2, 3, side, side, dtype=torch.uint8), torch.tensor([0, 1]))
        federation = Federation(images, Partition([np.arange(2)], [np.arange(0)], images.y.numpy(), 2))
        with accelerator():
            config = config_of("strategy=fedavg", "num_clients=1", "model=cnn")
            return workspace_of(config, device=device, federation=federation).evaluation_batch

    assert batch(32, NAME) == contrafed.training.workspace.EVALUATION_BATCH_ELSEWHERE
    assert batch(224, NAME) == 2**22 // (3 * 224 * 224) == 27
    assert batch(224, "cpu") == contrafed.training.workspace.EVALUATION_BATCH


def test_a_client_that_does_not_fit_alone_fails_and_says_so(monkeypatch):
    compared = PMFLClient._prepare_contrast

    def small(self, history, now):
        if 2 in self.clients and now.number == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compared(self, history, now)

    monkeypatch.setattr(PMFLClient, "_prepare_contrast", small)
    _, strategy = digits_run("pmfl", 2, clients=4, stack_size=4, may_fail=True)
    assert strategy.round.failures == ["client 2, round 2, step 1: OutOfMemoryError: CUDA out of memory"]
    assert strategy.round.rejected == {"failed": 1}


def test_a_data_set_that_does_not_fit_is_one_line_that_says_what_to_do(monkeypatch):
    config, to = config_of("strategy=fedavg", "num_clients=2"), torch.Tensor.to
    federation = workspace_of(config).federation

    def full(tensor, *args, **kwargs):
        if tensor is federation.data.x:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(UserError, match=r"^the images take 0\.0 GB, for which the GPU has no room: .*engine\.device=cpu"):
        workspace_of(config, federation=federation)


@pytest.mark.parametrize(
    "error",
    [
        TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."),
        RuntimeError("CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"),
    ],
)
def test_a_device_that_does_not_compute_is_refused_before_a_run(monkeypatch, error):
    def zeros(*_, dtype, **__):
        assert dtype == torch.float64
        raise error

    monkeypatch.setattr(torch, "zeros", zeros)
    said = re.escape(str(error).splitlines()[0][:60])
    with pytest.raises(UserError, match=rf"^engine\.device=mps cannot be used \({said}"):
        choose("engine", config_of("engine=local", "engine.device=mps")["engine"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=rf"^the GPU cannot be used \({said}.*engine.device=cpu"):
        contrafed.training.workspace.default_device()


def lose_gpu(*_):
    raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported")


def test_a_gpu_that_is_lost_is_no_clients_fault(monkeypatch):
    """Otherwise every later client would fail."""
    monkeypatch.setattr(PMFLClient, "_prepare_contrast", lose_gpu)
    with pytest.raises(LocalError, match="client 0, round 1, step 0: RuntimeError: CUDA error: device-side assert"):
        digits_run("pmfl", 1, clients=1)


@pytest.mark.parametrize("saved", [True, False])
def test_a_gpu_that_is_lost_ends_the_run_in_one_line(tmp_path, monkeypatch, saved):
    """Also if the model is on it and cannot be saved."""
    monkeypatch.setattr(PMFLClient, "_prepare_contrast", lose_gpu)
    if not saved:
        monkeypatch.setattr(RunRecorder, "save_model", lose_gpu)
    with pytest.raises(RunStopped, match=r"^the GPU is lost .*device-side assert.*resume=latest") as stopped:
        run_tiny(tmp_path / "run", "strategy=pmfl", "engine=local")
    assert "\n" not in str(stopped.value)


def test_a_run_of_another_machines_gpu_is_looked_at_without_one(tmp_path):
    run_tiny(tmp_path / "run", "strategy=fedavg", "engine=local", "num_rounds=1")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("device: null", "device: cuda:7"))
    z, labels, _ = embedding.of_run(tmp_path / "run", limit=10)
    assert len(z) == len(labels) == 10


TESTS = os.path.dirname(__file__)


class OnAccelerator(contrafed.engines.ray_worker.Worker):
    """A Ray worker with the simulated accelerator."""

    def __init__(self, *args):
        sys.path.insert(0, TESTS)  # of the worker's process
        import accelerator

        self.stand_in = accelerator.accelerator
        contrafed.engines.ray_worker.default_device = lambda: accelerator.NAME
        contrafed.training.workspace.EVALUATION_BATCH_ELSEWHERE = contrafed.training.workspace.EVALUATION_BATCH
        with self.stand_in():
            super().__init__(*args)
        assert self.runner.stack_size == 4

    def run(self, *args):
        with self.stand_in():
            return super().run(*args)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pmfl", "fedcrl"])
def test_ray_workers_with_an_accelerator_equal_the_cpu(tmp_path, monkeypatch, use_worker, method):
    here = run_tiny(tmp_path / "here", *STACKED_RUN, f"strategy={method}")
    on_ray = ("engine=ray", "engine.workers=1", *STACKED_RUN[1:])
    use_worker(OnAccelerator)
    monkeypatch.setattr(contrafed.engines.ray, "default_device", lambda: NAME)
    with accelerator():  # the driver evaluates there
        there = run_tiny(tmp_path / "there", f"strategy={method}", *on_ray)
    assert there[0]["device"] == NAME
    equals_local(there, here)


def test_a_rule_of_what_clients_worked_from_has_it_where_the_replies_are(tmp_path):
    """A run's first model is on the CPU. Clients receive it, and then train on the accelerator."""
    here, there = both(tmp_path, *STACKED_RUN, "strategy=fedawe")
    assert same(here[1], there[1])
