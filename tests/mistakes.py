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
    check: str  # what finds it, empty if nothing does
    line: bool  # whether the line with HERE is named. Otherwise that of its function is, or its layer
    code: str  # of the part


def method(signature, *lines):
    """Return a method of these lines."""
    return f"    def {signature}:\n" + "".join(f"        {line}\n" for line in lines)


def loss(*lines):
    return method("loss(self, params, batch, loss_inputs)", "features = self.forward(params, batch)", *lines)


def update(*lines):
    return method("local_update(self, stack)", "self.train(stack)", *lines, "return self.make_upload(stack)")


def net(init="", forward="", tail="nn.Tanh()"):
    return {"init": f"        {init}\n" if init else "", "forward": f"        {forward}\n" if forward else "", "tail": tail}


TASK = "task = self.task_loss(features, batch)"
SUM = 'return {"loss": task, "extra": task.detach()}'
WORK, RANDOM, STACK = "a client trains", "the global random state", "alone equals stacked"
PLACE, EXAMPLES, DATASET = "nothing is changed in place", "examples do not", "data and partition"
# By part, check, and whether the line is named: names and code.
BY_CHECK = {
    ("client", RANDOM, True): {
        "torch's global generator in a loss": loss(TASK, "task = task * (1 + torch.rand(()))  # HERE", SUM),
        "NumPy's global generator": update("np.random.permutation(3)  # HERE"),
        "Python's global generator in an evaluation": method(
            "eval_models(self, stack)", "random.random()  # HERE", "return {'model': stack.params}"
        ),
    },
    ("client", "two calls", True): {
        "a generator without a seed": loss(TASK, "task = task * float(np.random.default_rng().uniform(1, 2))  # HERE", SUM),
    },
    ("client", STACK, True): {
        "a branch on a tensor": loss(TASK, "if task > 1:  # HERE", "    task = 2 * task", SUM),
        "a number of a tensor": loss(TASK, "task = task * (1 + 0 * task.item())  # HERE", SUM),
        "a mean with padding": loss("task = F.cross_entropy(features.logits, batch.y)  # HERE", SUM),
    },
    ("client", "padding", False): {
        "padding as negatives": loss(
            "alike = features.z @ features.z.T  # HERE", TASK, "task = task + masked_mean(alike.logsumexp(1), batch.mask)", SUM
        ),
    },
    ("client", "gains nothing", True): {
        "an attribute of the client": update("self.rounds = 1  # HERE"),
        "a dictionary of the class": "    cache = {}\n"
        + update("self.cache[self.server_round, len(self.cache)] = stack.params  # HERE"),
        "a list of the module": update("SEEN.append(stack.clients)  # HERE"),
    },
    ("client", PLACE, True): {
        "a change of what was received": update("stack.global_model['classifier.bias'].mul_(0.5)  # HERE"),
    },
    ("client", WORK, True): {
        "an in-place edit that the gradient needs": loss(
            "e = features.logits.exp()  # HERE", "e += 1", "task = masked_mean(e.sum(1), batch.mask)", SUM
        ),
        "an in-place edit of parameters": loss(TASK, "params['classifier.bias'].mul_(0.9)  # HERE", SUM),
    },
    ("client", WORK, False): {
        "an upload of another shape": method(
            "local_update(self, stack)",
            "self.train(stack)  # HERE",
            "return {n: v[:, :1] for n, v in self.make_upload(stack).items()}",
        ),
        "a graph of an earlier step": loss(
            TASK, "total = task + getattr(self, 'last', 0)  # HERE", "self.last = total", SUM.replace("task,", "total,")
        ),
        "the template's parameters in place of params": loss(
            "task = cross_entropy(self.model(batch.x).logits, batch.y, batch.mask)  # HERE", SUM
        ),
        "a loss with another name": loss(TASK, 'return {"loss": task, "other": task.detach()}  # HERE'),
        "a state without an initial value": update("stack.state['last'] = stack.params['classifier.bias']  # HERE"),
    },
    ("client", "computes with its params", True): {
        "a penalty on the template's weights": loss(
            TASK, "task = task * (1 + self.model.classifier.weight.square().sum())  # HERE", SUM
        ),
    },
    ("client", EXAMPLES, True): {
        "scores relative to the batch": method(
            "scores(self, features, received)", "return features.logits / features.logits.abs().max()"
        ).replace(":", ":  # HERE", 1),
    },
    ("client", "training lowers", False): {
        "a loss of the wrong sign": loss(TASK, 'return {"loss": -task, "extra": task.detach()}  # HERE'),
    },
    ("client", "", False): {
        "a term without a gradient": loss(
            TASK, "task = task + masked_mean(features.z.detach().square().sum(1), batch.mask)  # HERE", SUM
        ),
    },
    ("model", PLACE, False): {"an in-place activation": net(tail="nn.ReLU(inplace=True)")},
    ("model", RANDOM, True): {"dropout in a forward pass": net(forward="x = F.dropout(x, 0.2)  # HERE")},
    ("model", "every parameter", True): {
        "layers in a list": net("self.more = [nn.Linear(4, 4)]  # HERE", "x = x + self.more[0].bias.sum()"),
        "a layer that is never used": net("self.third = nn.Linear(4, 4)  # HERE"),
    },
    ("model", EXAMPLES, True): {"means over the batch": net(forward="x = x - x.mean(0)  # HERE")},
    ("model", WORK, False): {
        "parameters that were stored before": net(
            "self.stored = self.second.weight.detach().clone()  # HERE", "x = x + F.conv2d(x, self.stored, padding=1)"
        ),
    },
    ("data", DATASET, True): {
        "data by NumPy's global generator": {"seed": "0", "code": "x = x[np.random.permutation(240)]  # HERE"},
    },
    ("data", DATASET, False): {"data of a generator without a seed": {"seed": "", "code": "pass  # HERE"}},
    ("strategy", RANDOM, True): {
        "a strategy that draws": "return {n: v + 0 * np.random.rand() for n, v in self.mean(model, replies).items()}  # HERE",
    },
    ("strategy", "two rounds", False): {
        "a strategy that changes replies": "replies[0].tensors['model/classifier.bias'].add_(1)  # HERE\n"
        "        return self.mean(model, replies)",
    },
    ("strategy", "count by their examples", False): {
        "a mean of replies without weights": "return replies.mean('model', np.ones(len(replies)))  # HERE",
    },
}
MISTAKES = [Mistake(name, *about, code) for about, some in BY_CHECK.items() for name, code in some.items()]


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
