"""A client's first step on a model of two numbers, which are the representation of its single image."""

import numpy as np
import torch

from contrafed.training.client_stack import ClientStack, ClientState


def loss_of(client, now, received, memory):
    """Return the named losses of ``hand.client_of(...)`` at parameters ``now`` (2,), and these as a leaf (1, 2).

    The client's own ``local_update`` starts there. The loss inputs are those of its first step.
    """
    tensor = lambda v: torch.tensor([v], dtype=torch.float64)  # noqa: E731
    params, received = {"classifier.w": tensor(now)}, {"model/classifier.w": tensor(received)}
    asked, loss, memory = [], client.loss, {n: v.clone() for n, v in memory.items()}
    client.loss = lambda params, batch, loss_inputs: asked.append((batch, loss_inputs)) or loss(params, batch, loss_inputs)
    client.local_update(ClientStack([0], [np.array([0])], 1, params, received, ClientState(memory, memory.__getitem__)))
    client.loss, w = loss, tensor(now).requires_grad_()
    return loss({"classifier.w": w[0]}, *asked[0]), w
