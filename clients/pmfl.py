"""PMFL's client: model contrast with the client's own recent iterates."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import OnlyWith, Range
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Step, Tensors
from contrafed.training.client_stack import each_image
from contrafed.training.losses import EPSILON, contrast, cosines, masked_mean

# If a single unit is active, representations are parallel and their cosine is 1 up to rounding.
# This tolerance decides such ties equally on every device and in every stack.
TIE_TOLERANCE = 1e-6


# Of keys that only the contrast reads.
CONTRAST = OnlyWith("contrast_weight")


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    contrast_weight: Annotated[float, Range(ge=0)]  # lambda. 0: the ablation w/o MCT
    temperature: Annotated[float, Range(gt=0), CONTRAST]  # tau
    buffer_size: Annotated[int, Range(ge=0), CONTRAST]  # N
    buffer_scope: Annotated[Literal["across", "within"], CONTRAST]  # whether the buffer spans rounds
    threshold: Annotated[Literal["previous", "literal", "current", "client", "constant"], CONTRAST]  # mu
    threshold_value: Annotated[float, Range(ge=-1, le=1), CONTRAST, OnlyWith("threshold", "constant")]  # mu
    buffer_start: Annotated[Literal["received", "previous"], CONTRAST]  # the model that a round's first step pushes


class PMFLClient(Client):
    """Minimise cross-entropy + lambda * l_con, with the contrast of Equation 5.

    The contrast is ``l_con = -log(pos / (pos + neg))``. In it z is the batch's representation under the model in training. Z is
    the one under the received model, and z_j those under the N buffered iterates.

    Positives: ``pos = e^(cos(z,Z)/tau) + sum over {j: cos(z,z_j) >= mu} e^(cos(z,z_j)/tau)``. Negatives: neg is the same sum
    over the other j. Each example is sorted again at each step, without a gradient. The buffer holds the models from which the
    client's last N steps started, also in earlier rounds.

    Source: Zhang et al. 2026 (arXiv:2602.11945), Algorithm 1.

    Deviation: the paper's threshold mu = cos(z_k^{tE}, Z^t) is 1 by its own definition of w_k^{tE}. The key ``threshold``
    selects the interpretation.

    - ``previous`` (default): z_k^{tE} is the representation under the client's last local model. In its first round mu is 1.
    - ``literal``: 1.
    - ``current``: cos(z, Z).
    - ``client``: the mean of ``previous`` over the batch.
    - ``constant``: a number.

    A similarity within 1e-6 of the threshold reaches it.

    Interpretation: the same symbol names the model that a round's first step pushes into the buffer. It is W^t (``buffer_start:
    received``, default) or the client's last local model (``previous``).
    """

    family = "contrast"
    paper = Paper(
        authors="Zhang, Yu, Wang, Ma, He, Chai and Hu",
        title=(
            "Towards Performance-Enhanced Model-Contrastive Federated Learning using Historical Information in "
            "Heterogeneous Scenarios"
        ),
        where="arXiv, 2026",
        url="https://arxiv.org/abs/2602.11945",
    )
    upload = "delta"
    loss_names = ("task", "contrast")

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return an empty ring of N models, the number of pushed iterates, a previous local model, and the participations."""
        if not self.config.contrast_weight:
            return {}
        model, zero = select_prefix(received, "model"), torch.zeros((), dtype=torch.int64, device=self.workspace.device)
        previous = add_prefix("previous", model) if self.keeps_previous else {}
        return init_ring(model, self.config.buffer_size) | previous | {"num_pushed": zero, "participations": zero}

    @property
    def _threshold_uses_previous(self) -> bool:
        return self.config.threshold in ("previous", "client")

    @property
    def keeps_previous(self) -> bool:
        """Whether the client state includes the last local model."""
        return self._threshold_uses_previous or self.config.buffer_start == "previous"

    def local_update(self, stack: ClientStack) -> Tensors:
        """Run Algorithm 1: E steps with the received, the previous and the buffered models. Upload Delta = w_end - W."""
        if not self.config.contrast_weight:
            return super().local_update(stack)
        if self.config.buffer_scope == "within":
            stack.state["num_pushed"].zero_()
        if self.config.buffer_size:
            previous = {"previous": select_prefix(stack.state, "previous")} if self.keeps_previous else {}
            buffer = IterateBuffer(self)
            prepare = partial(self._prepare_contrast, buffer)
            losses = self.train(stack, reference_models={"received": stack.global_model} | previous, before_step=prepare)
        else:
            losses = self.train(stack)
        stack.state["num_pushed"] += torch.tensor(losses.steps, device=self.workspace.device)
        stack.state["participations"] += 1
        if self.keeps_previous:
            stack.state |= add_prefix("previous", stack.params)
        return self.make_upload(stack)

    def _prepare_contrast(self, buffer: "IterateBuffer", step: Step) -> Tensors:
        """Return what the step's batch is compared with, and push the iterate that the step starts from.

        Returns:
            directions: Of the representations (B, b, 1 + n, D) under other models. Z is first, then z_j, newest first.
            missing: Which of them do not exist (B, 1 + n).
            mu: The thresholds (B, b).
        """
        received_z = step.reference_outputs["received"]  # Z
        buffered_z, missing = buffer.get_representations(step)
        buffer.push(step)  # Algorithm 1 pushes after the step. The contrast of this step does not see it here either.
        # Last comes the previous model's, for mu alone. Where mu does not need it, Z fills its place.
        reference_z = torch.stack([received_z, *buffered_z, step.reference_outputs.get("previous", received_z)], dim=2)
        directions = F.normalize(reference_z, dim=-1, eps=EPSILON)
        mu = torch.full_like(step.batch.mask, self.config.threshold_value if self.config.threshold == "constant" else 1.0)
        if self._threshold_uses_previous:
            previous_similarity = (directions[:, :, -1] * directions[:, :, 0]).sum(-1)
            if self.config.threshold == "client":
                mask = step.batch.mask
                mean = (previous_similarity * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
                previous_similarity = mean.expand_as(previous_similarity)
            mu = torch.where(step.stack.state["participations"].unsqueeze(1) > 0, previous_similarity, mu)
        return {"directions": directions[:, :, :-1], "missing": missing, "mu": mu}

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted contrast, which is 0 without a buffer."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        if not loss_inputs:
            return {"loss": task}
        similarity = cosines(features.z, loss_inputs["directions"])  # (b, 1 + n)
        mu = similarity[:, 0] if self.config.threshold == "current" else loss_inputs["mu"]
        is_negative = similarity < mu.unsqueeze(1) - TIE_TOLERANCE
        is_negative[:, 0] = False
        l_con = masked_mean(contrast(similarity / self.config.temperature, is_negative, loss_inputs["missing"]), batch.mask)
        return {"loss": task + self.config.contrast_weight * l_con, "task": task, "contrast": l_con}


class IterateBuffer:
    """The clients' last N iterates, and their representations of the batches to compare.

    A ring of N models is ``iterates/NAME`` (B, N, ...) in the client state. Iterate i is in slot i modulo N. Each iterate
    represents all of its batches at once, as soon as it exists, so that its weights are read once.
    """

    def __init__(self, client: PMFLClient) -> None:
        self.represent, self.size, self.start = client.represent, client.config.buffer_size, client.config.buffer_start
        self.cached_z: dict[int, list[Tensor]] = {}  # by step: representations (B, b, D) of its batch, newest iterate first

    def get_representations(self, step: Step) -> tuple[list[Tensor], Tensor]:
        """Return the representations of a step's batch under the buffered iterates.

        Returns:
            Representations (B, b, D), newest first, and a mask (B, 1 + n) of those that do not exist.
        """
        if step.number == 0:
            self.num_pushed: list[int] = step.stack.state["num_pushed"].tolist()  # this waits for an accelerator, once a round
            self._represent_earlier_iterates(step)
        count = len(step.stack)
        buffered_z = [z[:count] for z in self.cached_z.pop(step.number, [])]
        if 1 <= step.number <= self.size:
            buffered_z.insert(step.number - 1, step.reference_outputs[self.start])  # what the round's first step pushed
        buffered_z = buffered_z[: max(self.num_pushed[:count]) + step.number]
        ages = torch.arange(1 + len(buffered_z), device=step.batch.mask.device)
        return buffered_z, ages > (step.stack.state["num_pushed"] + step.number).unsqueeze(1)

    def push(self, step: Step) -> None:
        """Add the iterate that a step starts from. A round's first step adds the model of ``buffer_start``."""
        slot = self._slot(step, step.number)
        previous = step.number == 0 and self.start == "previous"
        pushed_model = select_prefix(step.stack.state, "previous") if previous else step.stack.params
        for name, ring in select_prefix(step.stack.state, "iterates").items():
            ring[slot] = pushed_model[name]
        if step.number:  # the first is among the reference models
            self._represent(step, step.stack.params, range(step.number + 1, step.number + 1 + self.size), newest=True)

    def _represent_earlier_iterates(self, step: Step) -> None:
        """Compute each earlier iterate's representations for the steps until it is replaced."""
        ring = select_prefix(step.stack.state, "iterates")
        for age in range(1, min(max(self.num_pushed), self.size) + 1):
            slot = self._slot(step, -age)
            self._represent(step, {n: v[slot] for n, v in ring.items()}, range(self.size - age + 1), newest=False)

    def _slot(self, step: Step, shift: int) -> Any:
        """Return the index in a ring (B, N, ...) of each client's iterate ``shift`` after the round's first."""
        count = len(step.stack)
        slots = {(number + shift) % self.size for number in self.num_pushed[:count]}
        if len(slots) == 1:
            return slice(None, count), slots.pop()
        num_pushed = step.stack.state["num_pushed"]
        return torch.arange(count, device=num_pushed.device), (num_pushed + shift) % self.size

    def _represent(self, step: Step, model: Tensors, numbers: range, newest: bool) -> None:
        """Cache a model's representations of the batches of some steps."""
        numbers = range(numbers.start, min(numbers.stop, len(step.batches.widths)))
        if not numbers:
            return
        z = each_image(self.represent, model, step.batches.images(numbers, len(step.stack)))
        for number, part in zip(numbers, z.split([step.batches.widths[i] for i in numbers], dim=1), strict=True):
            cached = self.cached_z.setdefault(number, [])
            cached.insert(0 if newest else len(cached), part)


def init_ring(model: Tensors, size: int) -> Tensors:
    """Return a ring full of the received model, without a copy: the stack makes it.

    The contrast leaves out what was not pushed. But a network may have no output for zeros: weight normalisation divides by 0.
    """
    return {f"iterates/{name}": value.expand(size, *value.shape) for name, value in model.items()} if size else {}
