"""FedPPO, the server half: an agent trained by proximal policy optimisation chooses who trains."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from contrafed.core.randomness import torch_generator
from contrafed.core.schema import Range
from contrafed.core.tensors import group, on_host
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights
from contrafed.strategies.ppo import Learning, draw, fresh_agent, learn, output, steps_of

LEAST = 1e-5  # of a loss's fall, in the reward


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the server half."""

    choose: Annotated[int, Range(ge=1)] | Annotated[float, Range(gt=0, lt=1)]  # m, or a share of the nodes with data
    choose_from: Literal["available", "all"]  # all: blind, and only those chosen train that are available
    agent_lr: Annotated[float, Range(gt=0)]
    discount: Annotated[float, Range(ge=0, le=1)]  # of the rounds that follow a choice
    agent_clip: Annotated[float, Range(gt=0)]
    agent_epochs: Annotated[int, Range(ge=0)]
    update_every: Annotated[int, Range(ge=1)]  # rounds
    entropy_weight: Annotated[float, Range(ge=0)]


class FedPPO(FedAvg):
    """W = the mean of the chosen nodes' models; m distinct nodes are drawn one after another from the actor's softmax.

    The state is the global accuracy and each node's last accuracy, zeros at first. The reward of node k is
    r_k = acc_k + acc_G d_k / sum_j d_j, d_k = max(last loss - loss, 1e-5), last losses 0 at first; a failed node gives none.
    Source: Zhang et al. 2023. Readings: acc_G is the mean accuracy of the received model on the participants' training parts,
    one round late; a choice's return is its reward and, discounted, the mean return of the next round, where the released code
    discounts along the simultaneous choices of one round. Left out, as in PMFL's tables: the clustering against wrong labels,
    the symmetric loss, the round in which all nodes train beforehand. Away nodes are never chosen (``choose_from=available``).
    """

    averages = True
    idle = True

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """The agent is rewarded for each node."""
        return "rewards its agent for single nodes"

    def setup(self) -> None:
        """Begin with an agent that draws uniformly."""
        nodes = self.population.num_nodes
        self.state["agent"], self.state["adam"] = fresh_agent(nodes, self.seed), {}
        self.state["accuracy"], self.state["loss"] = np.zeros(nodes), np.zeros(nodes)
        self.state["global_accuracy"], self.state["rollout"] = 0.0, []
        self.drawn: dict[str, Any] = {}  # of this round

    @property
    def count(self) -> int:
        """How many nodes are chosen a round: m."""
        share = self.config.choose
        return max(1, math.ceil(round(share * self.population.num_holders, 9))) if isinstance(share, float) else int(share)

    def select(self, server_round: int) -> np.ndarray:
        """Choose among those available, or among all with data, of whom the available train."""
        available = super().select(server_round)
        allowed = np.zeros(self.population.num_nodes, dtype=bool)
        allowed[available if self.config.choose_from == "available" else np.flatnonzero(self.population.sizes)] = True
        if not allowed.any():
            return available
        state = torch.from_numpy(np.append(self.state["global_accuracy"], self.state["accuracy"])).float()
        mask, logits = torch.from_numpy(allowed), output(on_host(group(self.state["agent"], "actor")), state)
        chosen = draw(logits, mask, self.count, torch_generator(self.seed, "ppo", server_round))
        logs, _ = steps_of(logits, mask, chosen)
        # Not part of the state: a checkpoint is written when the round is over.
        self.drawn = {"state": state, "allowed": mask, "chosen": torch.tensor(chosen), "logs": logs}
        return np.intersect1d(chosen, available).astype(np.int64)

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average, reward who trained, and every few rounds have the agent learn."""
        if len(replies):
            self._reward(replies)
        if self.round.server_round % self.config.update_every == 0 and self.state["rollout"]:
            how = Learning(self.config.agent_lr, self.config.agent_clip, self.config.agent_epochs, self.config.entropy_weight)
            # The agent learns where its states are: the server's tensors may have followed the replies to an accelerator.
            agent, adam, rollout = tree_map_only(Tensor, Tensor.cpu, [self.state[k] for k in ("agent", "adam", "rollout")])
            if how.epochs:
                learn(agent, adam, rollout, self.config.discount, how)
            self.state |= {"agent": agent, "adam": adam, "rollout": []}
        return self.mean(model, replies)

    def _reward(self, replies: Replies) -> None:
        """Keep the draw with the rewards of those that answered, and what they reported."""
        nodes, state = replies.nodes, self.state
        accuracy = np.array([float(reply.tensors["report/accuracy"]) for reply in replies])
        received = np.array([float(reply.tensors["report/received_accuracy"]) for reply in replies])
        before = state["loss"][nodes]
        loss = np.array([reply.metrics.get("loss", last) for reply, last in zip(replies, before, strict=True)])
        state["global_accuracy"] = float(np.average(received, weights=replies.num_examples))
        rewards = rewards_of(accuracy, state["global_accuracy"], before, loss)
        self.round.node_metrics["reward"] = (nodes, rewards)
        state["accuracy"][nodes], state["loss"][nodes] = accuracy, loss
        places = [self.drawn["chosen"].tolist().index(node) for node in nodes.tolist()]
        answered = {"rewarded": torch.tensor(places), "rewards": torch.from_numpy(rewards).float()}
        state["rollout"] = [*state["rollout"], self.drawn | answered]


def rewards_of(accuracy: np.ndarray, global_accuracy: float, before: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Return r_k = acc_k + acc_G d_k / sum_j d_j (m,), d_k = max(before - loss, 1e-5)."""
    fall = np.maximum(before - loss, LEAST)
    return np.asarray(accuracy + global_accuracy * fall / fall.sum())
