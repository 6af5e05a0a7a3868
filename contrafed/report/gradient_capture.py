"""Capture what a method's clients really upload for a few pictures: the gradient behind one step, and labels."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contrafed.config.compose import compose_job
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import Tensors, flat, select_prefix
from contrafed.data.federation import Federation
from contrafed.data.images import ImageData
from contrafed.data.partition import Partition
from contrafed.engines.client_registry import Members
from contrafed.report.inversion import gradient, weights_of
from contrafed.runs.session import make_strategy
from contrafed.runs.setup import check_config
from contrafed.training.workspace import Workspace

# Learning rate of the step. The rounding error of a float32 upload decreases with it.
RATE = 0.1


@dataclass
class Sent:
    """The information in one client's reply of its first round."""

    gradient: Tensors  # (received - uploaded) / rate for the shared parts, empty without any
    classes: list[int] | None  # from uploaded class counts, None without any
    names: list[str]  # of all uploaded tensors

    @property
    def description(self) -> str:
        """The uploaded parts of the model and other tensors, in words."""
        parts = dict.fromkeys(name.split("/")[-1].split(".")[0] if "." in name else name for name in self.names)
        return ", ".join(parts) or "nothing"

    def likeness(self, model: SplitModel, x: Tensor, labels: Sequence[int]) -> str:
        """Return the cosine of the gradient with the cross-entropy's at ``model``, over the shared parts, in words."""
        target = F.one_hot(torch.tensor(labels), model.num_classes).to(x)
        real = gradient(model, weights_of(model), x, target)
        a, b = (flat({name: tensors[name] for name in self.gradient}).double() for tensors in (self.gradient, real))
        return f"cosine with the cross-entropy's gradient {float(a @ b / (a.norm() * b.norm()).clamp_min(1e-30)):.4f}"


def sent_by(method: str, model: SplitModel, x: Tensor, labels: Sequence[int]) -> Sent:
    """Return a client's upload after one step of SGD on images x (b, C, H, W) in [0, 1].

    The client receives ``model`` and the other tensors of the strategy's first broadcast. Other settings are the method's.

    Args:
        method: Name of the method.
        model: The model.
        x: Images (b, C, H, W) in [0, 1], the client's whole data.
        labels: Their labels.

    Raises:
        UserError: If the method cannot run with them.
    """
    one_step = {"epochs": "null", "iterations": 1, "batch_size": len(labels), "optimizer": "sgd", "lr": RATE}
    plain = {"momentum": 0, "weight_decay": 0, "augment": "[]", "clip_norm": "null"}
    local = [f"strategy.local.{key}={value}" for key, value in (one_step | plain).items()]
    run = check_config(compose_job([f"strategy={method}", "num_clients=1", *local]))
    raw = (x * 255).round().to(torch.uint8)
    nothing = np.zeros(0, dtype=np.int64)
    channels, y = x.shape[1], torch.tensor(labels)
    data = ImageData(
        raw, y, torch.zeros(len(y), dtype=torch.bool), (0.0,) * channels, (1.0,) * channels, model.num_classes, None
    )
    partition = Partition([np.arange(len(y))], [nothing], y.numpy(), model.num_classes)
    workspace = Workspace(run.client, federation=Federation(data, partition), model=copy.deepcopy(model))
    members = Members(np.arange(1), workspace.federation, partition.class_counts(), run.client.to_json())
    strategy = make_strategy(run, workspace, members, rounds=1)
    received = strategy.broadcast(workspace.initial) | (
        strategy.per_client_broadcast(workspace.initial, 0, evaluating=False) or {}
    )
    (update,) = workspace.client_class(workspace, [0]).update([received], 1)
    before, after = select_prefix(received, "model"), select_prefix(update.tensors, "model")
    change = {name: value - before[name] for name, value in after.items()} or select_prefix(update.tensors, "delta")
    counts = update.tensors.get("proto/count")
    classes = None if counts is None else [c for c, n in enumerate(counts.tolist()) for _ in range(round(n))]
    return Sent({name: -value / RATE for name, value in change.items()}, classes, list(update.tensors))
