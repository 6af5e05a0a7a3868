"""Provide FedPPO's agent: an actor that ranks clients, a critic that values states, and proximal policy optimisation.

Source: Schulman et al. 2017 (arXiv:1707.06347), Equations 7 and 9. The method FedPPO is in strategies/fedppo.py.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrafed.core.randomness import torch_generator
from contrafed.core.tensors import Tensors, add_prefix, select_prefix

HIDDEN_WIDTH = 64  # units in each of two layers, with tanh
VALUE_WEIGHT = 0.5  # weight of the critic's squared error in the loss


class Learning(NamedTuple):
    """The agent's training settings, the usual constants of PPO."""

    rate: float
    clip: float
    epochs: int
    entropy_weight: float


def init_agent(num_clients: int, seed: int) -> Tensors:
    """Return an actor over K clients and a critic, both of a state (K + 1,), drawn from the seed.

    The actor's last layer is zero, so that an untrained actor draws uniformly.
    """
    generator = torch_generator(seed, "ppo init")
    agent: Tensors = {}
    for name, outputs in (("actor", num_clients), ("critic", 1)):
        widths = (num_clients + 1, HIDDEN_WIDTH, HIDDEN_WIDTH, outputs)
        for layer, (inputs, out) in enumerate(pairwise(widths)):
            bound = inputs**-0.5
            agent[f"{name}/{layer}.weight"] = (2 * torch.rand(out, inputs, generator=generator) - 1) * bound
            agent[f"{name}/{layer}.bias"] = (2 * torch.rand(out, generator=generator) - 1) * bound
    agent["actor/2.weight"].zero_()
    agent["actor/2.bias"].zero_()
    return agent


def forward(network: Tensors, state: Tensor) -> Tensor:
    """Return a network's output for a state (K + 1,): logits (K,) of an actor, or a value (1,) of a critic."""
    for layer in (0, 1):
        state = torch.tanh(network[f"{layer}.weight"] @ state + network[f"{layer}.bias"])
    return network["2.weight"] @ state + network["2.bias"]


def draw(logits: Tensor, allowed: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Draw up to ``count`` clients, one after another, from the softmax of ``logits`` over the clients left.

    Args:
        logits: Scores of the clients (K,).
        allowed: Mask of the clients that may be drawn (K,).
        count: Number of clients to draw.
        generator: Source of randomness.
    """
    # The largest values of logits plus Gumbel noise are such a draw.
    noise = -torch.log(-torch.log(torch.rand(len(logits), generator=generator, dtype=torch.float64)))
    scores = (logits.double() + noise).masked_fill(~allowed, -torch.inf)
    chosen: list[int] = scores.argsort(descending=True)[: min(count, int(allowed.sum()))].tolist()
    return chosen


def compute_log_probabilities(logits: Tensor, allowed: Tensor, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each choice of a draw among the clients left, and their entropy, (m,) each."""
    left, found, entropies = allowed, [], []
    for client in chosen:
        logs = torch.log_softmax(logits[left], dim=0)
        found.append(logs[int(left[:client].sum())])
        entropies.append(-(logs.exp() * logs).sum())
        left = left.clone()  # the previous mask is part of the graph
        left[client] = False
    return torch.stack(found), torch.stack(entropies)


def compute_returns(rollout: Sequence[dict[str, Any]], discount: float) -> list[Tensor]:
    """Return each round's returns (m,): a choice's own reward plus the discounted mean return of later rounds."""
    after, found = 0.0, list[Tensor]()
    for past in reversed(rollout):
        returns = past["rewards"] + discount * after
        after = float(returns.mean())
        found.append(returns)
    return found[::-1]


def learn(agent: Tensors, adam: Tensors, rollout: Sequence[dict[str, Any]], discount: float, settings: Learning) -> None:
    """Train the agent for a few epochs on a rollout, and update it and Adam's state in place.

    Args:
        agent: The tensors of actor and critic.
        adam: Adam's state.
        rollout: One dictionary for each round.
            From the draw it has ``state`` (K + 1,), ``allowed`` (K,), ``chosen`` (m,) and ``logs`` (m,).
            From the replies it has ``rewarded`` (r,), indices of chosen clients, and their ``rewards`` (r,).
        discount: Factor of later rounds' returns.
        settings: Training settings. Returns are standardised if at least two differ.
    """
    returns = compute_returns(rollout, discount)
    every = torch.cat(returns)
    if len(every) > 1 and float(every.std()) > 0:
        returns = [(target - every.mean()) / every.std() for target in returns]
    leaves = {name: value.clone().requires_grad_() for name, value in agent.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=settings.rate)
    for name, leaf in leaves.items():
        if kept := select_prefix(adam, name):
            optimizer.state[leaf] = dict(kept)
    for _ in range(settings.epochs):
        losses = []
        for past, target in zip(rollout, returns, strict=True):
            value = forward(select_prefix(leaves, "critic"), past["state"]).expand(len(target))
            logs, entropy = compute_log_probabilities(
                forward(select_prefix(leaves, "actor"), past["state"]), past["allowed"], past["chosen"].tolist()
            )
            rows, advantage = past["rewarded"], target - value.detach()
            ratio = (logs[rows] - past["logs"][rows]).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantage)
            losses.append(-gain + VALUE_WEIGHT * (value - target).square() - settings.entropy_weight * entropy[rows])
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    agent |= {name: leaf.detach() for name, leaf in leaves.items()}
    for name, leaf in leaves.items():
        adam |= add_prefix(name, dict(optimizer.state[leaf]))
