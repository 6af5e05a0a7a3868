"""Buffers next to parameters: BatchNorm in a stack of clients, what becomes of its statistics, and batches of one."""

import copy

import numpy as np
import pytest
import torch
from helpers import build_received, close, config_of, make_local_training, same, slow, workspace_of
from recording import settings_of, watch
from test_every import compare
from torch import nn

from contrafed.core.buffers import MaskedBatchNorm, list_buffers, prepare_buffers
from contrafed.core.build import build_model
from contrafed.core.client_run import choose
from contrafed.core.registry import choices
from contrafed.runs.run import run
from contrafed.training.loop import is_in

NETWORK = {"name": "cnn_bn", "channels": [3, 4], "kernel": 3, "hidden": [8], "momentum": 0.1}
ROUNDS = ((0, 1, 3), (1, 3, 4, 5), (), (0, 1, 4, 6))  # without the client of one example
SMALL = (
    "model=cnn_bn", "model.channels=[3]", "model.kernel=3", "model.hidden=[8]", "engine=local", "tracker=none",
    "num_clients=4", "num_rounds=2", "eval_every=2", "participation=full", "partition.min_client_size=20",
)  # fmt: skip


def test_the_limits_of_norms_leave_counters_out(tmp_path):
    many = ("strategy=fedavg", "strategy.local.iterations=200", "engine.max_norm=60", f"output_dir={tmp_path}/run")
    summary = run(config_of(*SMALL, *many))
    assert summary["replies_rejected"] == 0


def chosen(method, problem, buffers="average", **local):
    return settings_of(method, problem, last_batch="merge", **local) | {"model": NETWORK | {"buffers": buffers}}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_it_is_torchs_over_the_real_examples(momentum, affine):
    theirs = nn.BatchNorm2d(3, momentum=momentum, affine=affine).double()
    ours = copy.deepcopy(theirs)
    assert prepare_buffers(holder := nn.Sequential(ours)) == ""
    assert list_buffers(holder) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]
    for step in range(3):
        x = torch.randn(6, 3, 4, 4, dtype=torch.float64)
        real = 6 - step
        ours.mask = torch.tensor([1.0] * real + [0.0] * step, dtype=torch.float64)
        assert torch.allclose(ours(x)[:real], theirs(x[:real]), rtol=0, atol=1e-12)
    for name, value in theirs.named_buffers():
        assert torch.allclose(dict(ours.named_buffers())[name].double(), value.double(), rtol=0, atol=1e-12)
    ours.eval(), theirs.eval()
    assert torch.allclose(ours(x), theirs(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("method", "buffers"),
    [
        ("fedavg", "average"),
        slow("fedavg", "frozen"),
        slow("moon", "local"),
        slow("apfl", "average"),
        slow("perfedavg", "average"),
        ("fedbn", "local"),
    ],
)
def test_a_stack_equals_its_clients_alone(problem, method, buffers):
    compare(*(watch(chosen(method, problem, buffers), ROUNDS, stack_size=size) for size in (4, 1)), close)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(choices("strategy")))
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_every_method_trains_a_stack_as_its_clients_alone(problem, method, buffers):
    """For one round: FedRCL and FedSCL multiply a difference of 1e-15 by a thousand in each round, also without a stack."""
    alone, stacked = (watch(chosen(method, problem, buffers), ROUNDS[:1], stack_size=size) for size in (1, 4))
    assert not alone.rounds[-1].failures
    close(stacked.models[-1], alone.models[-1])
    for client, state in alone.client_states[-1].items():
        close(stacked.client_states[-1][client], state)


def test_where_the_statistics_are(problem):
    found = {buffers: watch(chosen("fedavg", problem, buffers), ROUNDS) for buffers in ("average", "local", "frozen")}
    name = "encoder.stages.0.1.running_mean"
    assert not same({name: found["average"].models[-1][name]}, {name: found["average"].models[0][name]})
    for buffers in ("local", "frozen"):
        assert torch.equal(found[buffers].models[-1][name], found[buffers].models[0][name])
    assert not any(found["average"].client_states[-1].values())
    assert not any(found["frozen"].client_states[-1].values())
    means = [memory[f"personal/{name}"] for memory in found["local"].client_states[-1].values() if memory]
    assert len(means) > 1
    assert not torch.equal(means[0], means[1])
    for message, reply in found["local"].trained:
        assert f"model/{name}" not in {*message.content["arrays"], *reply.content["arrays"]}


@pytest.mark.parametrize("method", [*("fedcrl", "fedas", "fedpac"), *(slow(name) for name in sorted(choices("strategy")))])
def test_local_statistics_are_those_that_the_client_trained(method):
    """All models of a client that has trained have a counter of batches above 0."""
    workspace = workspace_of(config_of(*SMALL, "model.buffers=local", f"strategy={method}", "strategy.local.last_batch=merge"))
    client, received = workspace.client_class(workspace, [0]), build_received(workspace)
    for server_round in (1, 2):
        (update,) = client.update([received], server_round)
        client.client_states = [update.client_state]
    (evaluation,) = client.evaluate_clients([received], 2)
    counters = {name: value for name, value in evaluation.model.items() if name.endswith("num_batches_tracked")}
    counters |= {name: value for name, value in update.client_state.items() if name.endswith("num_batches_tracked")}
    assert counters
    for name, value in counters.items():
        assert value.max() > 0, name


def test_the_server_averages_them_whatever_the_strategy_does(problem):
    """The mean of what the first round's clients sent, by examples; a counter stays a whole number."""
    for method in ("fedavg", "fedadam", "scaffold"):
        found = watch(chosen(method, problem), ROUNDS[:1], evaluate=False)
        replies = [reply.content for _, reply in found.trained]
        weights = np.array([reply["metrics"]["num-examples"] for reply in replies], dtype=float)
        for name in ("running_var", "num_batches_tracked"):
            name = f"encoder.stages.0.1.{name}"
            kind = "delta" if method == "scaffold" else "model"
            sent = np.stack([reply["arrays"][f"{kind}/{name}"].numpy() for reply in replies])
            mean = np.tensordot(weights / weights.sum(), sent, 1) + (found.models[0][name].numpy() if kind == "delta" else 0)
            expected = np.round(mean) if name.endswith("tracked") else mean
            assert found.models[1][name].numpy() == pytest.approx(expected, abs=1e-6)


def test_a_run_leaves_a_model_that_torch_loads(tmp_path):
    from safetensors.torch import load_file

    summary = run(config_of(*SMALL, "strategy=fedavg", f"output_dir={tmp_path}/run"))
    model = load_file(f"{summary['folder']}/model.safetensors")
    layer = nn.BatchNorm2d(3)
    layer.load_state_dict({name.rpartition(".")[2]: v for name, v in model.items() if name.startswith("encoder.stages.0.1.")})
    assert layer.num_batches_tracked > 0
    again = run(
        config_of(*SMALL, "strategy=fedavg", f"init_from={summary['folder']}/model.safetensors", f"output_dir={tmp_path}/b")
    )
    assert again["status"] == "finished"


def sizes_of(examples, **changes):
    return [
        len(batch)
        for batch in make_local_training(batch_size=4, **changes).batches(np.arange(examples), np.random.default_rng(0))
    ]


def test_the_last_batch_of_an_epoch():
    assert sizes_of(9, epochs=2) == [4, 4, 1, 4, 4, 1]
    assert sizes_of(9, epochs=2, last_batch="drop") == [4, 4, 4, 4]
    assert sizes_of(9, epochs=2, last_batch="merge") == [4, 5, 4, 5]
    for kind in ("keep", "drop", "merge"):
        assert sizes_of(3, epochs=1, last_batch=kind) == [3]
        for examples in (1, 3, 4, 5, 8, 11):
            work, found = (
                make_local_training(batch_size=4, epochs=1, last_batch=kind),
                sizes_of(examples, epochs=1, last_batch=kind),
            )
            assert work.steps(examples) == len(found)
            assert work.smallest_batch(examples) == min(found)


@pytest.mark.parametrize(
    ("method", "examples", "changes", "found"),
    [
        ("fedavg", 33, {"batch_size": 16}, {"strategy.local.batch_size": 1}),
        ("fedas", 33, {"align_batch": 32}, {"strategy.local.batch_size": 3, "strategy.align_batch": 1}),
        ("fedas", 33, {"align_batch": 32, "align_epochs": 0}, {"strategy.local.batch_size": 3}),
        (
            "fedavg_ft",
            33,
            {"tune": "all", "tune_batch_size": 1},
            {"strategy.local.batch_size": 3, "strategy.tune_batch_size": 1},
        ),
        ("fedavg_ft", 33, {"tune": "head", "tune_batch_size": 1}, {"strategy.local.batch_size": 3}),
        ("fedbabu", 33, {"tune": "all", "batch_size": 16, "iterations": 5}, {"strategy.local.batch_size": 1}),
        ("fedbabu", 33, {"tune": "head", "batch_size": 16, "iterations": 5}, {"strategy.local.batch_size": 16}),
        ("perfedavg", 3, {"batch_size": 16}, {"strategy.local.batch_size": 1}),
        ("perfedavg", 35, {"batch_size": 16}, {"strategy.local.batch_size": 1}),
        ("perfedavg", 36, {"batch_size": 16}, {"strategy.local.batch_size": 2}),
    ],
)
def test_the_smallest_batch_of_all_phases(method, examples, changes, found):
    own = {name: value for name, value in changes.items() if name not in ("batch_size", "iterations")}
    local = {"epochs": 2, "iterations": None, "batch_size": 30} | {n: v for n, v in changes.items() if n not in own}
    if local["iterations"]:
        local["epochs"] = None
    values = {f"strategy.{n}": v for n, v in own.items()} | {f"strategy.local.{n}": v for n, v in local.items()}
    changes = (f"{key}={'null' if value is None else value}" for key, value in values.items())
    workspace = workspace_of(config_of(*SMALL, f"strategy={method}", *changes))
    assert workspace.client_class.smallest_batches(workspace.config, examples) == found


class OwnForward(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm2d(2, track_running_stats=False), nn.InstanceNorm2d(2, track_running_stats=True), OwnForward(2)]
)
def test_layers_that_cannot_train_in_a_stack_are_refused(layer):
    assert "Fix: " in prepare_buffers(nn.Sequential(layer))


def test_tables_of_whole_numbers_are_constants():
    layer = nn.Module()
    layer.register_buffer("places", torch.arange(4))
    layer.register_buffer("scale", torch.ones(2))
    layer.register_buffer("count", torch.tensor(0))
    assert prepare_buffers(layer) == ""
    assert list_buffers(layer) == ["scale", "count"]
    assert layer.count.is_floating_point()
    assert not layer.places.is_floating_point()


def test_settings_that_mean_nothing_are_refused(expect_error):
    with expect_error("model.buffers"):
        choose("model", NETWORK | {"buffers": "none"})
    mlp = choose("model", {"name": "mlp", "hidden": [4], "projection": [], "buffers": "local"})
    with expect_error("model.buffers"):
        build_model(mlp, 1, (8, 8), 3, 0)


def test_shared_parts_may_be_patterns():
    norm = {"encoder.1.weight"}
    assert is_in("encoder.0.weight", ("encoder", "!norm"), norm)
    assert not is_in("encoder.1.weight", ("encoder", "!norm"), norm)
    assert is_in("encoder.1.weight", ("norm",), norm)
    assert is_in("encoder.0.weight", ("encoder.0.*",))
    assert not is_in("encoder.0.weight", ("encoder", "!*.weight"))
    assert not is_in("projector.0.weight", ("encoder",))


def test_the_class_stays_a_batch_norm():
    model = build_model(choose("model", NETWORK), 1, (8, 8), 3, 0)
    assert isinstance(model.encoder.stages[0][1], MaskedBatchNorm)
    assert {name.rpartition(".")[2] for name in model.buffer_names} == {"running_mean", "running_var", "num_batches_tracked"}
