"""The agent of FedPPO: an actor that ranks nodes, a critic that judges states, and proximal policy optimisation.

Source: Schulman et al. 2017 (arXiv:1707.06347), Equations 7 and 9; what it serves is FedPPO's (strategies/fedppo.py).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contrafed.core.randomness import torch_generator
from contrafed.core.tensors import Tensors, group, named

HIDDEN = 64  # two layers of so many, with tanh
VALUE_WEIGHT = 0.5  # of the critic's squared error in the loss


class Learning(NamedTuple):
    """How the agent learns; the usual constants of PPO."""

    rate: float
    clip: float
    epochs: int
    entropy_weight: float


def fresh_agent(num_nodes: int, seed: int) -> Tensors:
    """Return an actor over K nodes and a critic, both of a state (K + 1,), drawn from the seed.

    The actor's last layer is zero: before it learns it draws uniformly.
    """
    generator = torch_generator(seed, "ppo init")
    agent: Tensors = {}
    for name, outputs in (("actor", num_nodes), ("critic", 1)):
        widths = (num_nodes + 1, HIDDEN, HIDDEN, outputs)
        for layer, (inputs, out) in enumerate(pairwise(widths)):
            bound = inputs**-0.5
            agent[f"{name}/{layer}.weight"] = (2 * torch.rand(out, inputs, generator=generator) - 1) * bound
            agent[f"{name}/{layer}.bias"] = (2 * torch.rand(out, generator=generator) - 1) * bound
    agent["actor/2.weight"].zero_()
    agent["actor/2.bias"].zero_()
    return agent


def output(network: Tensors, state: Tensor) -> Tensor:
    """Return what a network makes of a state (K + 1,): logits (K,) of an actor, a value (1,) of a critic."""
    for layer in (0, 1):
        state = torch.tanh(network[f"{layer}.weight"] @ state + network[f"{layer}.bias"])
    return network["2.weight"] @ state + network["2.bias"]


def draw(logits: Tensor, allowed: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Draw up to ``count`` nodes, one after another, from the softmax of ``logits`` (K,) over the ``allowed`` (K,) left."""
    # The largest of logits plus Gumbel noise are such a draw.
    noise = -torch.log(-torch.log(torch.rand(len(logits), generator=generator, dtype=torch.float64)))
    scores = (logits.double() + noise).masked_fill(~allowed, -torch.inf)
    chosen: list[int] = scores.argsort(descending=True)[: min(count, int(allowed.sum()))].tolist()
    return chosen


def steps_of(logits: Tensor, allowed: Tensor, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return, for each choice of a draw, its log-probability among what was left, and the entropy of what was left (m,)."""
    left, found, entropies = allowed, [], []
    for node in chosen:
        logs = torch.log_softmax(logits[left], dim=0)
        found.append(logs[int(left[:node].sum())])
        entropies.append(-(logs.exp() * logs).sum())
        left = left.clone()  # the one before is part of the graph
        left[node] = False
    return torch.stack(found), torch.stack(entropies)


def returns_of(rollout: Sequence[dict[str, Any]], discount: float) -> list[Tensor]:
    """Return each round's returns (m,): a choice's own reward and, discounted, the mean return of the rounds that followed."""
    after, found = 0.0, list[Tensor]()
    for past in reversed(rollout):
        returns = past["rewards"] + discount * after
        after = float(returns.mean())
        found.append(returns)
    return found[::-1]


def learn(agent: Tensors, adam: Tensors, rollout: Sequence[dict[str, Any]], discount: float, how: Learning) -> None:
    """Improve the agent and Adam's state in place by a few epochs on the rounds of ``rollout``.

    A round has ``state`` (K + 1,), ``allowed`` (K,), ``chosen`` (m,), ``logs`` (m,) when drawn, ``rewarded`` (r,) places among
    the chosen, and their ``rewards`` (r,). Returns are standardised where two or more differ.
    """
    returns = returns_of(rollout, discount)
    every = torch.cat(returns)
    if len(every) > 1 and float(every.std()) > 0:
        returns = [(some - every.mean()) / every.std() for some in returns]
    leaves = {name: value.clone().requires_grad_() for name, value in agent.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=how.rate)
    for name, leaf in leaves.items():
        if kept := group(adam, name):
            optimizer.state[leaf] = dict(kept)
    for _ in range(how.epochs):
        losses = []
        for past, some in zip(rollout, returns, strict=True):
            value = output(group(leaves, "critic"), past["state"]).expand(len(some))
            logs, entropy = steps_of(output(group(leaves, "actor"), past["state"]), past["allowed"], past["chosen"].tolist())
            rows, advantage = past["rewarded"], some - value.detach()
            ratio = (logs[rows] - past["logs"][rows]).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - how.clip, 1 + how.clip) * advantage)
            losses.append(-gain + VALUE_WEIGHT * (value - some).square() - how.entropy_weight * entropy[rows])
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        optimizer.step()
    agent |= {name: leaf.detach() for name, leaf in leaves.items()}
    for name, leaf in leaves.items():
        adam |= named(name, dict(optimizer.state[leaf]))
