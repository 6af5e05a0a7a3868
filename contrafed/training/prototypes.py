"""Declare the messages that methods with class prototypes share, and count classes."""

import torch
from torch import Tensor

from contrafed.core.split_model import SplitModel
from contrafed.training.base import ClientStack, Shapes, Tensors
from contrafed.training.workspace import Workspace


def with_prototypes(model: SplitModel, broadcast_spec: Shapes, upload_spec: Shapes) -> tuple[Shapes, Shapes]:
    """Add a prototype table (C, D) to both messages, with its validity (down) or its class counts (up), each (C,)."""
    table, row = (model.num_classes, model.embedding_size), (model.num_classes,)
    return broadcast_spec | {"proto/mean": table, "proto/valid": row}, upload_spec | {"proto/mean": table, "proto/count": row}


def prototype_table(stack: ClientStack) -> Tensors:
    """Return the received prototypes (B, C, D) and which exist (B, C), for use as constants of a loss."""
    return {"means": stack.received["proto/mean"], "valid": stack.received["proto/valid"]}


def class_counts(workspace: Workspace, stack: ClientStack) -> Tensor:
    """Return how many training examples of each class the stack's clients have (B, C)."""
    index = [torch.from_numpy(examples).to(workspace.device) for examples in stack.examples]
    rows = [torch.bincount(workspace.labels(each), minlength=workspace.model.num_classes) for each in index]
    return torch.stack(rows).to(workspace.dtype)
