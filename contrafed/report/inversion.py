"""Recover pictures from gradients: DLG and iDLG, the attacks of MpFedcon's Table 4.

Sources: Zhu et al. 2019 (DLG), Zhao et al. 2020 (iDLG).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrafed.core.randomness import generator, torch_generator
from contrafed.core.split_model import SplitModel, Stages, features_of
from contrafed.core.tensors import Tensors

CHANNELS, BOUND = 12, 0.5
# A matching loss below this is a match.
MAX_MATCHING_LOSS = 1e-6
LAST_WEIGHT = "classifier.weight"


def sigmoid_lenet(channels: int, size: tuple[int, int], num_classes: int, seed: int, hidden: int = 0) -> SplitModel:
    """Build DLG's LeNet: three 5x5 convolutions of 12 channels, strides 2, 2, 1, sigmoid after each, then linear.

    Weights and biases are uniform in (-0.5, 0.5), a pure function of ``seed``.

    Args:
        channels: Channels of an image.
        size: Height and width in pixels.
        num_classes: Number of classes.
        seed: The seed.
        hidden: Number of linear layers with sigmoid before the last one, as wide as the last convolution's output.
    """
    widths, strides = (channels, CHANNELS, CHANNELS), (2, 2, 1)
    with torch.random.fork_rng(devices=[]):
        stages = [nn.Conv2d(c, CHANNELS, 5, stride, padding=2) for c, stride in zip(widths, strides, strict=True)]
        encoder = Stages(stages, [nn.Sigmoid(), nn.Sigmoid(), nn.Sequential(nn.Sigmoid(), nn.Flatten())])
        width = features_of(encoder, channels, size)
        extra = [layer for _ in range(hidden) for layer in (nn.Linear(width, width), nn.Sigmoid())]
        model = SplitModel(encoder, nn.Sequential(*extra) if extra else nn.Identity(), nn.Linear(width, num_classes))
    draw = torch_generator(seed, "leakage model")
    with torch.no_grad():
        for value in model.parameters():
            value.uniform_(-BOUND, BOUND, generator=draw)
    return model.requires_grad_(False)


def weights_of(model: SplitModel) -> Tensors:
    """Return a model's parameters by name, as copies."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def gradient(model: SplitModel, params: Mapping[str, Tensor], x: Tensor, target: Tensor, *, graph: bool = False) -> Tensors:
    """Compute the gradient of the mean cross-entropy.

    Args:
        model: The network.
        params: Its parameters.
        x: Images (b, C, H, W).
        target: Label distributions (b, K).
        graph: Make the gradient itself differentiable.
    """
    leaves = {name: value if value.requires_grad else value.detach().requires_grad_() for name, value in params.items()}
    with model.holding(leaves) as held:
        loss = F.cross_entropy(held(x).logits, target)
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=graph)
    return dict(zip(leaves, found, strict=True))


def label_of(shared: Mapping[str, Tensor]) -> int:
    """Return the label of the one example behind a gradient: the class whose row of the last layer has the smallest sum.

    Source: iDLG, Equation 5. The row of class c is (p_c - y_c) h with h > 0, so that only the true class's row is negative.

    Raises:
        ValueError: If the last layer's gradient was not shared.
    """
    if LAST_WEIGHT not in shared:
        raise ValueError("no last-layer gradient")
    return int(shared[LAST_WEIGHT].sum(1).argmin())


def noisy(shared: Mapping[str, Tensor], kind: Literal["none", "gaussian", "laplace"], variance: float, seed: int) -> Tensors:
    """Add noise of mean 0 and ``variance`` to every number of a gradient: Gaussian, or Laplace of scale sqrt(v / 2)."""
    if kind == "none" or variance == 0:
        return dict(shared)
    rng = generator(seed, f"leakage noise {kind}")
    scale = variance**0.5 if kind == "gaussian" else (variance / 2) ** 0.5
    draw = rng.normal if kind == "gaussian" else rng.laplace
    return {name: value + torch.from_numpy(draw(0.0, scale, value.shape)).to(value) for name, value in shared.items()}


@dataclass
class Found:
    """The result of an attack from one start."""

    images: Tensor  # (b, C, H, W), not cut to [0, 1]
    labels: list[int]
    loss: float  # the squared distance between the gradients, over all that was shared
    steps: int
    path: list[Tensor]  # the images (b, C, H, W) before each step, and after the last one


def invert(
    model: SplitModel,
    params: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    shape: tuple[int, ...],
    *,
    labels: list[int] | None,
    steps: int,
    seed: int,
    searched: tuple[str, ...] = (),
) -> Found:
    """Search for images whose gradient under ``params`` is ``shared``, with torch's L-BFGS at rate 1.

    The images, and without ``labels`` the label distributions, start from N(0, 1), a pure function of ``seed``. A step is one
    of torch's, of up to 20 iterations. The step with the smallest distance is returned, because without a line search a later
    one may be far off.

    Args:
        model: The attacker's network.
        params: Its parameters.
        shared: The shared gradient. Other tensors are not compared.
        shape: Shape of the images (b, C, H, W).
        labels: Known labels, or None.
        steps: Largest number of steps.
        seed: The seed.
        searched: Names of ``params`` to search too, starting from their values.
    """
    draw = torch_generator(seed, "leakage start")
    x = torch.randn(shape, generator=draw).requires_grad_()
    soft = torch.randn(shape[0], model.num_classes, generator=draw).requires_grad_()
    known = None if labels is None else F.one_hot(torch.tensor(labels), model.num_classes).to(x)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    unknown = [x, *([soft] if known is None else []), *(leaves[name] for name in searched)]
    optimizer = torch.optim.LBFGS(unknown, lr=1)

    def distance() -> Tensor:
        found = gradient(model, leaves, x, soft.softmax(1) if known is None else known, graph=True)
        return sum(((found[name] - value).square().sum() for name, value in shared.items()), torch.zeros(()))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = distance()
        loss.backward(inputs=unknown)  # type: ignore[no-untyped-call]
        return loss

    best, taken, path = (float("inf"), x.detach().clone(), soft.detach().clone()), 0, []
    for step in range(steps + 1):
        before = x.detach().clone(), soft.detach().clone()
        path.append(before[0])
        # A step returns the distance at its start.
        loss = float((optimizer.step(closure) if step < steps else distance()).detach())
        if loss < best[0]:
            best = (loss, *before)
        taken = step
        if not loss > MAX_MATCHING_LOSS:  # matched, or no longer a number
            break
    labels = best[2].argmax(1).tolist() if labels is None else labels
    return Found(best[1], labels, best[0], taken, path)
