"""Own layers in training: buffers that a forward pass updates, alone and in a stack. What cannot be right is refused."""

import os
import re

import pytest
import torch
from helpers import build_received, config_of, same, slow, stacked_and_alone
from own_layers import Centred
from safetensors.torch import load_file, save_file
from test_models import built_by, split_of
from test_networks import make
from tiny import engines_agree
from torch import nn
from torchvision.ops import StochasticDepth

from contrafed.check.command import check_run
from contrafed.config.run_config import resolve
from contrafed.core.build import build_model
from contrafed.core.client_run import choose, client_run_of
from contrafed.core.drawn import replace_drawing
from contrafed.core.split_model import SplitModel, Stages
from contrafed.engines.engine_run import stack_size_for
from contrafed.engines.ray import stop_ray
from contrafed.runs.run import run
from contrafed.training.batches import draw_batches
from contrafed.training.workspace import Workspace

RUN = (
    "model=torch", "strategy=fedavg", "strategy.local.iterations=null", "strategy.local.epochs=2", "tracker=none",
    "num_clients=4", "num_rounds=2", "eval_every=2", "participation=full", "partition.min_client_size=20",
    "dataset.fraction=0.2",
)  # fmt: skip
BUFFER = "model/encoder.stages.0.net."


@pytest.fixture
def worker_path(monkeypatch):
    """Have Ray's workers find the networks of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")]))
    stop_ray()  # its workers have the environment of its start


def settings(name, last_batch, sizes, *more):
    parts = ("partition=iid", "num_clients=5") if sizes == "equal" else ("partition=dirichlet",)
    return (*RUN, f"model.target=own_layers.{name}", f"strategy.local.last_batch={last_batch}", *parts, *more)


def open_workspace(*about):
    return Workspace(client_run_of(config_of(*settings(*about))), dtype=torch.float64)


@pytest.mark.parametrize("last_batch", ["keep", "drop", "merge"])
@pytest.mark.parametrize("sizes", ["equal", "ragged"])
def test_a_counter_counts_the_steps_of_its_client_in_a_stack(sizes, last_batch):
    workspace = open_workspace("Counter", last_batch, sizes)
    assert workspace.model.one_by_one == ""
    assert workspace.initial["encoder.stages.0.net.calls"] == 0
    for update, size in zip(stacked_and_alone(workspace, rounds=1), workspace.federation.partition.sizes, strict=True):
        assert update.tensors[f"{BUFFER}calls"] == workspace.config.local.steps(int(size))


@pytest.mark.parametrize("last_batch", ["keep", "drop", "merge"])
@pytest.mark.parametrize("name", ["RunningMean", "Centred", "SeenExamples"])
@pytest.mark.parametrize("sizes", ["equal", "ragged"])
def test_what_learns_from_a_whole_batch_has_no_stack(name, sizes, last_batch):
    """Each client alone gives what a loop of plain torch does."""
    workspace = open_workspace(name, last_batch, sizes)
    assert "whole batch" in workspace.model.one_by_one
    assert [stack_size_for(wanted, workspace) for wanted in (None, 4, "auto")] == [1, 1, 1]


def test_a_client_alone_learns_what_plain_torch_does():
    workspace = open_workspace("Centred", "keep", "ragged", "strategy.local.momentum=0", "strategy.local.weight_decay=0")
    client = workspace.client_class(workspace, [1])
    (update,) = client.update([build_received(workspace)], 1)
    net = Centred().double().train()
    begun = {theirs: workspace.initial[ours].to(net.state_dict()[theirs]) for theirs, ours in names(workspace)}
    net.load_state_dict(begun, strict=False)
    optimizer = torch.optim.SGD(net.parameters(), workspace.config.local.rate(1))
    examples = workspace.federation.partition.train(1)
    for batch in draw_batches(workspace.config.local, examples, workspace.seed, "batches", 1, 1):
        index = torch.from_numpy(batch)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(workspace.images(index)), workspace.labels(index)).backward()
        optimizer.step()
    for theirs, ours in names(workspace):
        torch.testing.assert_close(update.tensors[f"model/{ours}"].to(net.state_dict()[theirs]), net.state_dict()[theirs])


def names(workspace):
    return [(theirs, ours) for theirs, ours in workspace.model.own_names.items() if ours in workspace.initial]


def test_what_vmap_has_no_rule_for_runs_one_by_one(tmp_path, capsys):
    """Spectral normalisation updates its buffers by an operation that vmap refuses. A line reports this once."""
    more = ("engine=local", "engine.stack_size=4", f"output_dir={tmp_path}/run")
    assert run(config_of(*settings("Spectral", "merge", "ragged"), *more))["failures"] == 0
    assert capsys.readouterr().out.count("one by one") == 1


@pytest.mark.parametrize("name", ["Centred", "Counter"])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_a_given_stack_leaves_what_clients_alone_leave(name, buffers, tmp_path, capsys):
    """Of a network without a stack the bits are equal, and a line says why it has none."""
    models = []
    for size in ("null", 4):
        more = ("engine=local", f"engine.stack_size={size}", f"model.buffers={buffers}", f"output_dir={tmp_path}/{size}")
        summary = run(config_of(*settings(name, "keep", "ragged"), *more))
        assert summary["failures"] == 0
        models.append(load_file(f"{summary['folder']}/model.safetensors"))
    said = capsys.readouterr().out
    assert said.count("one by one, because mean learns from a whole batch") == 2 * (name == "Centred")
    if name == "Centred":
        assert same(*models)
    for key, value in models[0].items():
        torch.testing.assert_close(models[1][key], value, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["Centred", slow("Counter"), slow("RunningMean")])
def test_ray_leaves_the_same_with_a_given_stack(name, tmp_path, worker_path):
    engines_agree(tmp_path, "ray", *settings(name, "keep", "ragged"))


@pytest.mark.slow
def test_a_worker_of_ray_has_no_stack_either(tmp_path, worker_path):
    models = []
    for engine, size in (("local", 1), ("ray", 4)):
        more = (f"engine={engine}", f"engine.stack_size={size}", f"output_dir={tmp_path}/{engine}")
        models.append(load_file(f"{run(config_of(*settings('Centred', 'keep', 'ragged'), *more))['folder']}/model.safetensors"))
    assert same(*models)


@pytest.mark.parametrize(("name", "skipped"), [("Centred", 2), ("Counter", 0)])
def test_check_skips_the_stack_of_a_network_that_has_none(name, skipped):
    found = list(check_run(resolve(config_of(*settings(name, "merge", "ragged"), "engine=local"))))
    assert [text for _, result, text in found if result == "failed"] == []
    assert sum(result == "skipped" and "one by one" in text for _, result, text in found) == skipped


def test_a_trial_changes_nothing_that_a_run_begins_with(tmp_path):
    """Weights of a file come with their running statistics."""
    network = Centred()
    network.mean.fill_(3)
    network.calls.fill_(7)
    save_file(network.state_dict(), tmp_path / "a.safetensors")
    model = make("own_layers.Centred", channels=1, pretrained=str(tmp_path / "a.safetensors"))
    assert model.tensors()["encoder.stages.0.net.calls"] == 7
    assert (model.tensors()["encoder.stages.0.net.mean"] == 3).all()


def test_parameters_without_a_gradient_are_told():
    (line,) = make("own_layers.WithoutGradient", channels=1).notices
    assert "2 of 2 tensors never train, such as body.weight" in line


REFUSED = {
    "Unconditional": "changes calls in evaluation too",
    "Assigned": "assigns mean",
    "AssignedCounter": "assigns calls",
    "WithGraph": "leaves a graph in mean",
    "Histogram": "changes counts",
    "Numpy": "draws at random",
    "PythonRandom": "draws at random",
    "NumpyGenerator": "two passes over the same images differ",
    "NumpyInTraining": "two passes over the same images differ",
    "LastBatch": "two passes over the same images differ",
    "PlainNumber": "net.kept changes in the forward pass",
    "WithoutBuffers": "layers without buffers act differently in training",
    "WithoutSuper": r"before super\(\).__init__\(\) \(tests/own_layers.py, line \d+\)",
    "WithoutLayers": r"WithoutLayers.__init__ does not call super\(\).__init__\(\) \(tests/own_layers.py, line \d+\)",
    "LayerWithoutSuper": r"WithoutLayers.__init__ does not call super\(\).__init__\(\) \(tests/own_layers.py, line \d+\)",
    "RaisesInForward": r"IndexError: .* \(tests/own_layers.py, line \d+\)",
    "WrongShape": r"RuntimeError: .* \(tests/own_layers.py, line \d+\)",
    "HiddenLayers": "blocks hides layers",
    "Lazy": "body.weight has no size yet",
    "Logarithm": "not finite",
    "BatchStatistics": "images of one batch have influence on each other",
    "Divides": r"raises ZeroDivisionError: .* \(tests/own_layers.py, line \d+\)",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_client_can_keep_is_one_line(name, expect_error):
    state = torch.get_rng_state()
    with expect_error("model.target" if name not in ("RaisesInForward", "WrongShape") else "model") as found:
        make(f"own_layers.{name}", channels=1)
    assert re.search(REFUSED[name], str(found.value))
    assert torch.equal(torch.get_rng_state(), state)


class Body(nn.Module):
    """A network that acts in training as ``act`` of its first layer's output and itself says."""

    def __init__(self, act, layer=None):
        super().__init__()
        self.first, self.layer, self.act = nn.Linear(64, 16), layer or nn.Identity(), act

    def forward(self, x):
        return self.act(self.layer(self.first(x.flatten(1))), self)


ACTS = {
    "a factor": lambda x, body: x * 100 if body.training else x,
    "dropout": lambda x, body: nn.functional.dropout(x, 0.9, body.training),
    "a private generator": lambda x, body: x + body.training * torch.randn(x.shape, generator=torch.Generator()),
    "two outputs": lambda x, body: (x, x) if body.training else x,
    "an error": lambda x, body: x.missing if body.training else x,
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_what_acts_only_in_training_where_a_layer_never_is_is_refused(act, expect_error):
    with expect_error("model"):
        built_by(split_of(lambda: Body(act)))()


def test_so_is_a_layer_that_drops_by_itself_unless_its_draws_are_replaced(expect_error):
    def build(*given):
        return split_of(lambda: Body(lambda x, body: x, StochasticDepth(0.5, "row")))(*given)

    def build_drawn(*given):
        replace_drawing(model := build(*given))
        return model

    with expect_error("model") as found:
        built_by(build)()
    assert "encoder.stages.0.layer (StochasticDepth)" in str(found.value)
    assert built_by(build_drawn)().draws


@pytest.mark.parametrize("act", [lambda x, body: x.log(), lambda x, body: nn.functional.dropout(x, 0.5)])
def test_what_acts_in_evaluation_too_is_left_to_other_checks(act):
    """Its outputs are not finite, or it draws, which a check of the method names with its line."""
    built = built_by(split_of(lambda: Body(act)))()
    assert not any(layer.training for layer in built.modules())


def test_layers_with_buffers_and_the_projects_own_dropout_may_act_in_training():
    def build(config, in_channels, image_size, num_classes):
        stage = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16))
        return SplitModel(Stages([stage], [nn.ReLU()]), nn.Identity(), nn.Linear(16, num_classes), dropout=0.5)

    assert built_by(build)().dropout == 0.5


def test_networks_of_the_project_are_not_tried_so(monkeypatch):
    monkeypatch.setattr("contrafed.core.build.find_inactive", None)
    build_model(choose("model", config_of("model=resnet18")["model"]), 1, (8, 8), 10, 0)
