"""FedPPO's strategy: an agent, trained by proximal policy optimisation, selects the clients that train."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from contrafed.core.randomness import torch_generator
from contrafed.core.rounding import round_up
from contrafed.core.schema import Range
from contrafed.core.tensors import on_host, select_prefix
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights
from contrafed.strategies.ppo import Learning, compute_log_probabilities, draw, forward, init_agent, learn

MIN_LOSS_FALL = 1e-5  # lower bound of a loss's decrease, in the reward


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy."""

    choose: Annotated[int, Range(ge=1)] | Annotated[float, Range(gt=0, lt=1)]  # m, or a share of the clients to select from
    choose_from: Literal["available", "all", "everyone"]  # all: selected clients that are not available do not train
    agent_lr: Annotated[float, Range(gt=0)]
    discount: Annotated[float, Range(ge=0, le=1)]  # of the rounds after a choice
    agent_clip: Annotated[float, Range(gt=0)]
    agent_epochs: Annotated[int, Range(ge=0)]
    update_every: Annotated[int, Range(ge=1)]  # rounds
    entropy_weight: Annotated[float, Range(ge=0)]


class FedPPO(FedAvg):
    """Average the models of clients that an agent selects.

    W is their mean. m distinct clients are drawn one after another from the actor's softmax. The agent's state is the global
    accuracy and each client's last accuracy, which start at zero. The reward of client k is r_k = acc_k + acc_G d_k / sum_j
    d_j, with d_k = max(last loss - loss, 1e-5). The last losses start at 0. A client that failed gives no reward. With
    ``choose_from=available`` absent clients are never selected. With ``everyone`` availability is ignored: all selected clients
    train.

    Source: Zhang et al. 2023, which PMFL cites, and the code of Zhao et al. 2025 for the agent.

    Interpretation: acc_G is the received model's mean accuracy on the participants' training parts. It is one round late. A
    choice's return is its reward plus the discounted mean return of the next round. The released code discounts along the
    simultaneous choices of one round.

    Deviation: as in PMFL's tables, three parts are left out. They are the clustering against wrong labels, the symmetric loss
    and the initial training round of all clients.
    """

    linear_in_updates = True
    aggregates_empty_rounds = True

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: the agent is rewarded for each client."""
        return "rewards its agent for single clients"

    def setup(self) -> None:
        """Start with an agent that draws uniformly."""
        clients = self.population.num_clients
        self.state["agent"], self.state["adam"] = init_agent(clients, self.seed), {}
        self.state["accuracy"], self.state["loss"] = np.zeros(clients), np.zeros(clients)
        self.state["global_accuracy"], self.state["rollout"] = 0.0, []
        self.drawn: dict[str, Any] = {}  # this round's draw

    def count(self, candidates: int) -> int:
        """Return the number of clients to select from so many (m)."""
        choose = self.config.choose
        if isinstance(choose, float):
            return max(1, round_up(choose * candidates))
        return int(choose)

    def select(self, server_round: int) -> np.ndarray:
        """Select among the available clients or all with data, and return those of them that train."""
        available = super().select(server_round)
        allowed = np.zeros(self.population.num_clients, dtype=bool)
        allowed[available if self.config.choose_from == "available" else np.flatnonzero(self.population.sizes)] = True
        if not allowed.any():
            return available
        state = torch.from_numpy(np.append(self.state["global_accuracy"], self.state["accuracy"])).float()
        mask, logits = torch.from_numpy(allowed), forward(on_host(select_prefix(self.state["agent"], "actor")), state)
        chosen = draw(logits, mask, self.count(int(mask.sum())), torch_generator(self.seed, "ppo", server_round))
        logs, _ = compute_log_probabilities(logits, mask, chosen)
        # Not in the state, because a checkpoint is written after the round.
        self.drawn = {"state": state, "allowed": mask, "chosen": torch.tensor(chosen), "logs": logs}
        if self.config.choose_from == "everyone":
            return np.sort(np.array(chosen, dtype=np.int64))
        return np.intersect1d(chosen, available).astype(np.int64)

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average, reward the participants, and train the agent every few rounds."""
        if len(replies):
            self._reward(replies)
        if self.round.server_round % self.config.update_every == 0 and self.state["rollout"]:
            config = self.config
            settings = Learning(config.agent_lr, config.agent_clip, config.agent_epochs, config.entropy_weight)
            # Train on the CPU, where the agent's states are. Replies may have moved other tensors to an accelerator.
            agent, adam, rollout = tree_map_only(Tensor, Tensor.cpu, [self.state[k] for k in ("agent", "adam", "rollout")])
            if settings.epochs:
                learn(agent, adam, rollout, self.config.discount, settings)
            self.state |= {"agent": agent, "adam": adam, "rollout": []}
        self.drawn = {}
        return self.mean(model, replies)

    def _reward(self, replies: Replies) -> None:
        """Store the draw, the rewards of the clients that replied, and their reports."""
        clients, state = replies.clients, self.state
        accuracy, received = (
            np.clip([float(reply.tensors[f"report/{name}"]) for reply in replies], 0, 1)  # a device may report anything
            for name in ("accuracy", "received_accuracy")
        )
        before = state["loss"][clients]
        loss = np.array([reply.metrics.get("loss", last) for reply, last in zip(replies, before, strict=True)])
        state["global_accuracy"] = float(np.average(received, weights=replies.num_examples))
        rewards = compute_rewards(accuracy, state["global_accuracy"], before, loss)
        self.round.client_metrics["reward"] = (clients, rewards)
        state["accuracy"][clients], state["loss"][clients] = accuracy, loss
        places = [self.drawn["chosen"].tolist().index(client) for client in clients.tolist()]
        answered = {"rewarded": torch.tensor(places), "rewards": torch.from_numpy(rewards).float()}
        state["rollout"] = [*state["rollout"], self.drawn | answered]


def compute_rewards(accuracy: np.ndarray, global_accuracy: float, before: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Return r_k = acc_k + acc_G d_k / sum_j d_j (m,), with d_k = max(before - loss, 1e-5)."""
    fall = np.maximum(before - loss, MIN_LOSS_FALL)
    return np.asarray(accuracy + global_accuracy * fall / fall.sum())
