"""Thirty mistakes of authors, one of each, and what ``contrafed check`` finds. The line with ``# HERE`` is the mistake."""

from typing import NamedTuple

CLIENT = """
import random
from dataclasses import dataclass
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from contrafed import Client, LocalTraining
from contrafed.core.split_model import SplitModel, Stages, features_of
from contrafed.core.tensors import add_prefix
from contrafed.data.images import Common, make_images
from contrafed.strategies.fedavg import FedAvg, Weights
from contrafed.training.losses import cosine, cross_entropy, masked_mean

SEEN = []


@dataclass(frozen=True)
class Config:
    local: LocalTraining


class Mine(Client):
    loss_names = ("extra",)

    def loss(self, params, batch, loss_inputs):
        features = self.forward(params, batch)
        return {"loss": self.task_loss(features, batch), "extra": self.extra(features, batch, params)}

    def extra(self, features, batch, params):
        return masked_mean(features.z.square().sum(1), batch.mask)
"""
MODEL = """
@dataclass(frozen=True)
class Config:
    pass


class Net(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first = nn.Conv2d(channels, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
{init}
    def forward(self, x):
        x = self.first(x)
        x = torch.tanh(self.second(x))
{forward}
        return x.mean((2, 3))


def build(config, in_channels, image_size, num_classes):
    stages = [Net(in_channels), nn.Linear(4, 5)]
    return SplitModel(Stages(stages, [nn.Identity(), {tail}]), nn.Identity(), nn.Linear(5, num_classes))
"""
DATA = """
@dataclass(frozen=True)
class Config(Common):
    pass


def load(config, name):
    y = np.arange(240) % 3
    rng = np.random.default_rng({seed})
    x = rng.integers(0, 200, (240, 9, 9), dtype=np.uint8) + (20 * y[:, None, None]).astype(np.uint8)
    {code}
    return make_images(x, y, np.arange(240) % 4 == 0)
"""
STRATEGY = """

@dataclass(frozen=True)
class Config(Weights):
    local: LocalTraining


class MyStrategy(FedAvg):
    def aggregate(self, model, replies):
        {code}
"""


class Mistake(NamedTuple):
    """A mistake in one part of an author's code."""

    name: str
    part: str  # client, model, data, strategy
    code: str  # of the part
    check: str  # what finds it, empty if nothing does
    line: bool = True  # whether the line with HERE is named. Otherwise that of its function is, or its layer


def loss(*lines):
    """Return a loss of these lines, whose last one is the sum."""
    body = "\n        ".join(lines)
    return f"    def loss(self, params, batch, loss_inputs):\n        features = self.forward(params, batch)\n        {body}\n"


TASK = "task = self.task_loss(features, batch)"
SUM = 'return {"loss": task, "extra": task.detach()}'
WORK, RANDOM, REPEAT = "a client trains", "the global random state", "two calls"
STACK, PADDING, EXAMPLES, COPIES = "alone equals stacked", "padding", "examples do not", "copies"
GAIN, PLACE, TEMPLATE, PARTS, DATASET = (
    "gains nothing",
    "nothing is changed in place",
    "computes with its params",
    "every parameter",
    "data and partition",
)
ROUNDS = "two rounds"
UPDATE = "    def local_update(self, stack):\n        self.train(stack)\n        {}\n        return self.make_upload(stack)\n"


def net(init="", forward="", tail="nn.Tanh()"):
    return {"init": f"        {init}\n" if init else "", "forward": f"        {forward}\n" if forward else "", "tail": tail}


MISTAKES = [
    Mistake(
        "torch's global generator in a loss", "client", loss(TASK, "task = task * (1 + torch.rand(()))  # HERE", SUM), RANDOM
    ),
    Mistake("NumPy's global generator", "client", UPDATE.format("np.random.permutation(3)  # HERE"), RANDOM),
    Mistake(
        "Python's global generator in an evaluation",
        "client",
        "    def eval_models(self, stack):\n        random.random()  # HERE\n        return {'model': stack.params}\n",
        RANDOM,
    ),
    Mistake(
        "a generator without a seed",
        "client",
        loss(TASK, "task = task * float(np.random.default_rng().uniform(1, 2))  # HERE", SUM),
        REPEAT,
    ),
    Mistake("a branch on a tensor", "client", loss(TASK, "if task > 1:  # HERE", "    task = 2 * task", SUM), STACK),
    Mistake("a number of a tensor", "client", loss(TASK, "task = task * (1 + 0 * task.item())  # HERE", SUM), STACK),
    Mistake("a mean with padding", "client", loss("task = F.cross_entropy(features.logits, batch.y)  # HERE", SUM), STACK),
    Mistake(
        "padding as negatives",
        "client",
        loss(
            "alike = features.z @ features.z.T  # HERE", TASK, "task = task + masked_mean(alike.logsumexp(1), batch.mask)", SUM
        ),
        PADDING,
        False,
    ),
    Mistake(
        "an upload of another shape",
        "client",
        "    def local_update(self, stack):\n        self.train(stack)  # HERE\n"
        "        return {n: v[:, :1] for n, v in self.make_upload(stack).items()}\n",
        WORK,
        False,
    ),
    Mistake("an attribute of the client", "client", UPDATE.format("self.rounds = 1  # HERE"), GAIN),
    Mistake(
        "a dictionary of the class",
        "client",
        "    cache = {}\n" + UPDATE.format("self.cache[self.server_round, len(self.cache)] = stack.params  # HERE"),
        GAIN,
    ),
    Mistake("a list of the module", "client", UPDATE.format("SEEN.append(stack.clients)  # HERE"), GAIN),
    Mistake(
        "a change of what was received",
        "client",
        UPDATE.format("stack.global_model['classifier.bias'].mul_(0.5)  # HERE"),
        PLACE,
    ),
    Mistake(
        "an in-place edit that the gradient needs",
        "client",
        loss("e = features.logits.exp()  # HERE", "e += 1", "task = masked_mean(e.sum(1), batch.mask)", SUM),
        WORK,
    ),
    Mistake("an in-place edit of parameters", "client", loss(TASK, "params['classifier.bias'].mul_(0.9)  # HERE", SUM), WORK),
    Mistake(
        "a graph of an earlier step",
        "client",
        loss(
            TASK,
            "total = task + getattr(self, 'last', 0)  # HERE",
            "self.last = total",
            'return {"loss": total, "extra": task.detach()}',
        ),
        WORK,
        False,
    ),
    Mistake(
        "the template's parameters in place of params",
        "client",
        loss("task = cross_entropy(self.model(batch.x).logits, batch.y, batch.mask)  # HERE", SUM),
        WORK,
        False,
    ),
    Mistake(
        "a penalty on the template's weights",
        "client",
        loss(TASK, "task = task * (1 + self.model.classifier.weight.square().sum())  # HERE", SUM),
        TEMPLATE,
    ),
    Mistake(
        "a loss with another name", "client", loss(TASK, 'return {"loss": task, "other": task.detach()}  # HERE'), WORK, False
    ),
    Mistake(
        "a state without an initial value",
        "client",
        UPDATE.format("stack.state['last'] = stack.params['classifier.bias']  # HERE"),
        WORK,
        False,
    ),
    Mistake(
        "scores relative to the batch",
        "client",
        "    def scores(self, features, received):  # HERE\n        return features.logits / features.logits.abs().max()\n",
        EXAMPLES,
    ),
    Mistake("an in-place activation", "model", net(tail="nn.ReLU(inplace=True)"), PLACE, False),
    Mistake("dropout in a forward pass", "model", net(forward="x = F.dropout(x, 0.2)  # HERE"), RANDOM),
    Mistake(
        "layers in a list",
        "model",
        net("self.more = [nn.Linear(4, 4)]  # HERE", "x = x + self.more[0].bias.sum()"),
        PARTS,
    ),
    Mistake("a layer that is never used", "model", net("self.third = nn.Linear(4, 4)  # HERE"), PARTS),
    Mistake("means over the batch", "model", net(forward="x = x - x.mean(0)  # HERE"), EXAMPLES),
    Mistake(
        "parameters that were stored before",
        "model",
        net("self.stored = self.second.weight.detach().clone()  # HERE", "x = x + F.conv2d(x, self.stored, padding=1)"),
        WORK,
        False,
    ),
    Mistake(
        "data by NumPy's global generator", "data", {"seed": "0", "code": "x = x[np.random.permutation(240)]  # HERE"}, DATASET
    ),
    Mistake("data of a generator without a seed", "data", {"seed": "", "code": "pass  # HERE"}, DATASET, False),
    Mistake(
        "a strategy that draws",
        "strategy",
        "return {n: v + 0 * np.random.rand() for n, v in self.mean(model, replies).items()}  # HERE",
        RANDOM,
    ),
    Mistake(
        "a strategy that changes replies",
        "strategy",
        "replies[0].tensors['model/classifier.bias'].add_(1)  # HERE\n        return self.mean(model, replies)",
        ROUNDS,
        False,
    ),
    Mistake(
        "a loss of the wrong sign",
        "client",
        loss(TASK, 'return {"loss": -task, "extra": task.detach()}  # HERE'),
        "training lowers",
        False,
    ),
    Mistake(
        "a term without a gradient",
        "client",
        loss(TASK, "task = task + masked_mean(features.z.detach().square().sum(1), batch.mask)  # HERE", SUM),
        "",
    ),
    Mistake(
        "a mean of replies without weights",
        "strategy",
        "return replies.mean('model', np.ones(len(replies)))  # HERE",
        "count by their examples",
        False,
    ),
]


def write_mistake(folder, mistake):
    """Write the author's package and YAMLs into ``folder``, and return the overrides of a run and the line of the mistake."""
    text = CLIENT + (f"\n{mistake.code}" if mistake.part == "client" else "")
    files = {"client": text}
    chosen = {"strategy": "mine", "model": "mlp", "dataset": "digits"}
    if mistake.part == "model":
        files["client"], files["model"] = CLIENT, CLIENT.split("@dataclass")[0] + MODEL.format(**mistake.code)
        chosen["model"] = "mine"
    if mistake.part == "data":
        files["client"], files["data"] = CLIENT, CLIENT.split("@dataclass")[0] + DATA.format(**mistake.code)
        chosen["dataset"] = "mine"
    if mistake.part == "strategy":
        files["strategy"] = CLIENT.split("@dataclass")[0] + STRATEGY.format(code=mistake.code)
    package = folder / "author"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, code in files.items():
        (package / f"{name}.py").write_text(code)
    server = "server: author.strategy" if mistake.part == "strategy" else ""
    yamls = {
        "strategy": f"name: mine\nmodule: author.client\nweights: samples\n{server}\n",
        "model": "name: mine\nmodule: author.model\n",
    }
    yamls["strategy"] = (
        f"defaults: [_local@local{'' if server else ', server: fedavg'}, _self_]\n{yamls['strategy']}local: {{iterations: 2}}\n"
    )
    yamls["dataset"] = "defaults: [_common, _self_]\nname: mine\nmodule: author.data\n"
    for group, yaml in yamls.items():
        (folder / "yamls" / group).mkdir(parents=True)
        (folder / "yamls" / group / "mine.yaml").write_text(yaml)
    file = package / f"{mistake.part}.py"
    line = next((k for k, text in enumerate(file.read_text().splitlines(), 1) if "# HERE" in text), 0)
    overrides = ["num_clients=10", *(f"{group}={name}" for group, name in chosen.items())]
    return [*overrides, *(["model.hidden=[6]"] if chosen["model"] == "mlp" else [])], f"author/{mistake.part}.py, line {line}"
