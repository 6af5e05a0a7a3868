"""FedALA, the node half: a learned element-wise blend of own and global model to start from."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import group, named
from contrafed.training.base import Batch, Client, LocalTraining, Stack, Step, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    local: LocalTraining
    layers: Annotated[int, Range(ge=1)]  # p, the last so many are blended
    share: Annotated[float, Range(gt=0, le=1)]  # s, of the node's examples
    blend_lr: Annotated[float, Range(gt=0)]  # eta
    settled: Annotated[float, Range(ge=0)]  # the first blend is learned when losses deviate less than this
    window: Annotated[int, Range(ge=1)]  # over so many passes
    max_passes: Annotated[int, Range(ge=1)]


class FedALAClient(Client):
    """Last p layers := w_k + (W - w_k) A, the others W, w_k the node's last trained model; then FedAvg's local work.

    A := clip(A - eta dL/dA, 0, 1) over a random share of the examples: one pass a round, in a node's second participation as
    many until the standard deviation of the last ``window`` passes' losses (each its last batch's) is below ``settled``. A is 1
    at first; in its first participation a node takes W whole. Source: Zhang et al. 2023, Algorithm 1 and Equations 3-5.
    Deviations: a node counts from its last participation (the authors' code blends in idle nodes too); judged by the trained
    model, beside it, without learning, by the ``blend`` of it and what the node received.
    """

    family = "personal, a whole model"
    paper = Paper(
        authors="Zhang, Hua, Wang, Song, Xue, Ma and Guan",
        title="FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
        where="AAAI 2023",
        url="https://arxiv.org/abs/2212.01197",
    )
    own_model = True

    def fresh_memory(self, received: Tensors) -> Tensors:
        """w_k = W, A = 1."""
        model = group(received, "model")
        ones = {name: torch.ones_like(model[name]) for name in top_layers(self.model, self.config.layers)}
        rounds = torch.zeros((), dtype=self.workspace.dtype, device=self.workspace.device)
        return named("own", model) | named("blend", ones) | {"rounds": rounds}

    def local_work(self, stack: Stack) -> Tensors:
        """Learn A, blend, train, remember the trained model."""
        self._learn(stack)
        stack.params |= self._blend(stack)
        self.train(stack)
        stack.memory |= named("own", stack.params) | {"rounds": stack.memory["rounds"] + 1}
        return self.sent(stack)

    def _learn(self, stack: Stack) -> None:
        """Move A; a node that has no model of its own yet, or is done, has no examples."""
        config, blend = self.config, named("blend", stack.remembered("blend"))
        work, constants = config.local.plain(config.blend_lr, epochs=1), stack.params | named("own", stack.remembered("own"))
        some, rounds, last = self._some(stack), stack.memory["rounds"], list[Tensor]()
        going = rounds > 0
        while going.any() and len(last) < config.max_passes:
            losses = self.train(
                stack,
                params=blend,
                examples=[part if on else part[:0] for part, on in zip(some, going.tolist(), strict=True)],
                work=work,
                parts=("blend",),
                loss=self._blended_loss,
                constants=constants,
                each_step=_clip,
                purpose=f"blend {len(last)}",
            )
            for value in blend.values():
                value.clamp_(0, 1)
            last.append(losses.last("loss"))
            going = going & (rounds == 1)
            if len(last) > config.window:
                going &= ~(torch.stack(last[-config.window :]).std(0, correction=0) < config.settled)
        stack.memory |= blend

    def _some(self, stack: Stack) -> list[np.ndarray]:
        """Return the share of each node's examples that A is learned on."""
        about = (self.workspace.seed, "blend examples", stack.server_round)
        known = zip(stack.examples, stack.nodes, strict=True)
        return [generator(*about, node).permutation(part)[: self._share_of(len(part))] for part, node in known]

    def _share_of(self, examples: int) -> int:
        return max(1, round(self.config.share * examples)) if examples else 0

    def _blend(self, stack: Stack) -> Tensors:
        """Return the blended layers (B, ...)."""
        return blended(stack.remembered("own"), stack.global_model, stack.remembered("blend"))

    def _blended_loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """The task's loss of the model that starts the round, as a function of A."""
        received = {name: value for name, value in constants.items() if "/" not in name}
        top = blended(group(constants, "own"), received, group(params, "blend"))
        return super().loss(received | top, batch, {})

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """A node is judged by the model it last trained; by the blend that it would start from too."""
        return {"model": stack.remembered("own"), "blend": stack.params | self._blend(stack)}

    def work_of(self, examples: int) -> int:
        """Return the steps of one pass over the share, and of training."""
        blend = self.config.local.plain(self.config.blend_lr, epochs=1)
        return blend.steps(self._share_of(examples)) + super().work_of(examples)


def _clip(now: Step) -> dict[str, Any]:
    """Keep A within [0, 1] from step to step."""
    for value in now.stack.params.values():
        value.clamp_(0, 1)
    return {}


def blended(own: Tensors, received: Tensors, share: Tensors) -> Tensors:
    """Return w + (W - w) A of the tensors that have an A."""
    return {name: torch.lerp(own[name], received[name], a) for name, a in share.items()}


def top_layers(model: SplitModel, count: int) -> list[str]:
    """Return the names of the last ``count`` layers' tensors."""
    names = [name for name, _ in model.named_parameters()]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))[-count:]
    return [name for name in names if name.rpartition(".")[0] in layers]
