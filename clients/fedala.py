"""FedALA's client: start from a learned element-wise blend of the own and the global model."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Step, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    layers: Annotated[int, Range(ge=1)]  # p, the number of last layers that are blended
    share: Annotated[float, Range(gt=0, le=1)]  # s, the share of the client's examples
    blend_lr: Annotated[float, Range(gt=0)]  # eta
    settled: Annotated[float, Range(ge=0)]  # bound on the losses' standard deviation that ends the first blend
    window: Annotated[int, Range(ge=1)]  # number of passes in that standard deviation
    max_passes: Annotated[int, Range(ge=1)]


class FedALAClient(Client):
    """Blend the last p layers of the own and the received model, then train as FedAvg does.

    Last p layers := w_k + (W - w_k) A, the other layers := W. w_k is the client's last trained model. A := clip(A - eta dL/dA,
    0, 1) over a random share of the examples. A starts at 1. A is learned for one pass a round. In a client's second
    participation the passes continue until their losses settle. They settle when the standard deviation over the last
    ``window`` passes is below ``settled``. The loss of a pass is that of its last batch. In its first participation a client
    takes all of W. A client is evaluated by its trained model. The second score, ``blend``, is that of the trained and the
    received model's blend, without learning A.

    Source: Zhang et al. 2023, Algorithm 1 and Equations 3-5.

    Deviation: w_k is the model of the client's last participation. The authors' code blends in absent clients too.
    """

    family = "personal, all layers"
    paper = Paper(
        authors="Zhang, Hua, Wang, Song, Xue, Ma and Guan",
        title="FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
        where="AAAI 2023",
        url="https://arxiv.org/abs/2212.01197",
    )
    own_model = True
    whole_training_reason = "how many passes A takes is not known before"
    model_names = ("blend",)

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return w_k = W and A = 1."""
        model = select_prefix(received, "model")
        ones = {name: torch.ones_like(model[name]) for name in top_layers(self.model, self.config.layers)}
        zero = torch.zeros((), dtype=self.workspace.dtype, device=self.workspace.device)
        return add_prefix("own", model) | add_prefix("blend", ones) | {"participations": zero}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Learn A, blend, train, and keep the trained model."""
        self._learn(stack)
        stack.params |= self._blend(stack)
        self.train(stack)
        stack.state |= add_prefix("own", stack.params) | {"participations": stack.state["participations"] + 1}
        return self.make_upload(stack)

    def _learn(self, stack: ClientStack) -> None:
        """Learn A. A client without a trained model, or whose A has settled, gets no examples."""
        config, blend = self.config, add_prefix("blend", stack.get_state("blend"))
        local_training = config.local.plain(config.blend_lr, epochs=1)
        loss_inputs = stack.params | add_prefix("own", stack.get_state("own"))
        drawn, participations, last = self._draw_blend_examples(stack), stack.state["participations"], list[Tensor]()
        going = participations > 0
        while going.any() and len(last) < config.max_passes:
            losses = self.train(
                stack,
                params=blend,
                examples=[part if on else part[:0] for part, on in zip(drawn, going.tolist(), strict=True)],
                local_training=local_training,
                parts=("blend",),
                loss=self._blended_loss,
                loss_inputs=loss_inputs,
                before_step=_clip,
                purpose=f"blend {len(last)}",
            )
            for value in blend.values():
                value.clamp_(0, 1)
            last.append(losses.last("loss"))
            going = going & (participations == 1)
            if len(last) > config.window:
                going &= ~(torch.stack(last[-config.window :]).std(0, correction=0) < config.settled)
        stack.state |= blend

    def _draw_blend_examples(self, stack: ClientStack) -> list[np.ndarray]:
        """Return the share of each client's examples on which A is learned."""
        about = (self.workspace.seed, "blend examples", stack.server_round)
        known = zip(stack.examples, stack.clients, strict=True)
        return [generator(*about, client).permutation(part)[: self._count_blend_examples(len(part))] for part, client in known]

    def _count_blend_examples(self, examples: int) -> int:
        return max(1, round(self.config.share * examples)) if examples else 0

    def _blend(self, stack: ClientStack) -> Tensors:
        """Return the blended layers (B, ...)."""
        return blend_models(stack.get_state("own"), stack.global_model, stack.get_state("blend"))

    def _blended_loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the task's loss of the model that starts the round, as a function of A."""
        received = {name: value for name, value in loss_inputs.items() if "/" not in name}
        top = blend_models(select_prefix(loss_inputs, "own"), received, select_prefix(params, "blend"))
        return super().loss(received | top, batch, {})

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the last trained model, which a client is evaluated by, and the blend that it would start from."""
        return {"model": stack.get_state("own"), "blend": stack.global_model | self._blend(stack)}

    def num_local_steps(self, examples: int) -> int:
        """Return the number of steps of one pass over the share, and of training."""
        blend = self.config.local.plain(self.config.blend_lr, epochs=1)
        return blend.steps(self._count_blend_examples(examples)) + super().num_local_steps(examples)


def _clip(now: Step) -> dict[str, Any]:
    """Keep A within [0, 1] from step to step."""
    for value in now.stack.params.values():
        value.clamp_(0, 1)
    return {}


def blend_models(own: Tensors, received: Tensors, share: Tensors) -> Tensors:
    """Return w + (W - w) A of the tensors that have an A."""
    return {name: torch.lerp(own[name], received[name], a) for name, a in share.items()}


def top_layers(model: SplitModel, count: int) -> list[str]:
    """Return the names of the last ``count`` layers' tensors."""
    names = [name for name, _ in model.named_parameters()]
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))[-count:]
    return [name for name in names if name.rpartition(".")[0] in layers]
