"""FedNova's strategy: normalise updates by their steps, so that longer local training gets no more weight."""

from typing import Any

import numpy as np

from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.paper import Paper
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg
from contrafed.strategies.fedavg import Weights as Config
from contrafed.training.local_training import LocalTraining

__all__ = ["Config", "FedNova"]


class FedNova(FedAvg):
    """Step W += (sum_k p_k a_k) sum_k p_k Delta_k / a_k.

    The weights p_k follow ``weights`` over the participants and sum to 1. The length a_k, in the paper |a_k|_1, is the distance
    that SGD moves on a constant gradient of 1, divided by its rate. For plain SGD it is the number of steps. Momentum increases
    it. A rate that decays within the round, or a pull towards W, decreases it. The server computes it from the training
    settings and the number of examples in the reply. With a pull towards W the factor sums the numbers of steps in place of
    a_k, as in the authors' code. A round without replies changes nothing.

    Source: Wang et al. 2020, Section 4, without its server momentum.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Wang, Liu, Liang, Joshi and Poor",
        title="Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
        where="NeurIPS 2020",
        url="https://arxiv.org/abs/2007.07481",
    )

    whole_training_reason = "it divides by the planned steps"

    @classmethod
    def check(cls, config: Any, client: Choice, participation: Choice) -> None:
        """Raise ``UserError`` unless the optimizer is SGD without state between rounds, because Adam has no such length."""
        local = client.config.local
        if local.optimizer != "sgd" or (local.momentum and local.keep_optimizer):
            wanted = "strategy.local.optimizer=sgd and strategy.local.keep_optimizer=false"
            raise UserError(f"strategy.server=fednova divides by the length of SGD's steps; set {wanted}")

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the step: the mean update per step, times the mean number of steps."""
        shares, now = self.sample_weights(replies), self.round.server_round
        local = self.client_class.upload_training(self.client_config)
        lengths = np.array([path_length(local, now, int(examples)) for examples in replies.num_examples])  # a_k
        effective = np.array([local.steps(int(n)) for n in replies.num_examples]) if local.proximal_weight else lengths
        total = shares @ effective / shares.sum()
        self.round.metrics["effective_steps"] = float(total)
        weights = np.divide(shares / shares.sum() * total, lengths, out=np.zeros(len(replies)), where=lengths > 0)
        return {name: model[name] + step for name, step in replies.weighted_sum("delta", weights).items()}


def path_length(local_training: LocalTraining, server_round: int, examples: int) -> float:
    """Return the distance that SGD moves in a round on a constant gradient of 1.

    Returns:
        The distance in units of the first learning rate, and 0 without steps.
    """
    moved, speed, first, each = 0.0, 0.0, local_training.rate(server_round), local_training.steps_per_pass(examples)
    for step in range(local_training.steps(examples)):
        speed = local_training.momentum * speed + 1 - local_training.proximal_weight * first * moved
        moved += local_training.rate(server_round, step // each) / first * speed
    return moved
