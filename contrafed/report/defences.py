"""Define the cases of gradient leakage, attack them, and measure what an attacker recovers."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import Tensors
from contrafed.report.inversion import Found, gradient, invert, label_of, noisy, sigmoid_lenet, weights_of

# Layers of DLG's LeNet: the start of their tensors' names.
LAYERS = {
    "conv1": "encoder.stages.0.",
    "conv2": "encoder.stages.1.",
    "conv3": "encoder.stages.2.",
    "linear": "projector.",
    "last": "classifier.",
}


@dataclass(frozen=True)
class Case:
    """What is shared of a gradient, and how it is attacked."""

    attack: Literal["dlg", "idlg"] = "dlg"
    # layers that stay on the client, so that the attacker has neither their gradient nor their weights
    hidden: tuple[str, ...] = ()
    # whether the attacker searches the hidden layers' weights together with the images, or draws them once
    searched: bool = False
    withheld: tuple[str, ...] = ()  # layers whose gradient is not uploaded, although the attacker knows their weights
    noise: Literal["none", "gaussian", "laplace"] = "none"
    variance: float = 0.0
    cl: int = 1  # linear layers of the client's network
    at: int = 1  # linear layers of the attacker's network


CASES = {
    "all_shared": Case(),
    "all_shared_idlg": Case("idlg"),
    **{f"{kind}_1e-{n}": Case(noise=kind, variance=10.0**-n) for kind in ("gaussian", "laplace") for n in (4, 2)},
    **{f"hidden_{layer}": Case(hidden=(layer,)) for layer in ("last", "conv3", "conv2", "conv1")},
    "searched_last": Case(hidden=("last",), searched=True),
    **{f"withheld_{layer}": Case(withheld=(layer,)) for layer in ("last", "conv3", "conv2", "conv1")},
    **{f"hidden_cl{cl}_at{at}": Case(hidden=("linear", "last"), cl=cl, at=at) for cl, at in ((1, 2), (2, 1), (2, 2))},
}

# MpFedcon's Figure 10: the client keeps cl linear layers, and the attacker draws at others. (1, 1) is hidden_last.
GROUPS = {"figure10": ["all_shared", "hidden_last", *(name for name in CASES if name.startswith("hidden_cl"))]}


@dataclass(frozen=True)
class Settings:
    """The attacker's effort."""

    steps: int = 100
    starts: int = 3
    seed: int = 0


@dataclass
class Attempt:
    """The result of an attack on a batch: the attacker's pictures in the order of the true ones, and their errors."""

    pictures: np.ndarray  # (b, C, H, W) in [0, 1], of the start with the smallest distance between gradients
    labels: list[int]  # labels of the pictures
    loss: float
    best_mse: np.ndarray  # (b,) the smallest over all starts, which an attacker cannot know
    steps: int
    seconds: float
    curve: np.ndarray  # (steps + 1, b) each picture's error before each step of this start, and after the last one


def begins(name: str, layers: tuple[str, ...]) -> bool:
    """Return whether a tensor belongs to one of these layers."""
    return name.startswith(tuple(LAYERS[layer] for layer in layers)) if layers else False


def attack_case(case: Case, x: Tensor, labels: list[int], num_classes: int, how: Settings, number: int) -> Attempt:
    """Attack what a client shares of images x (b, C, H, W) in [0, 1] under ``case``. ``number`` selects the draw of noise."""
    channels, size = x.shape[1], (x.shape[2], x.shape[3])
    model = sigmoid_lenet(channels, size, num_classes, how.seed, case.cl - 1)
    params = weights_of(model)
    real = gradient(model, params, x, F.one_hot(torch.tensor(labels), num_classes).to(x))
    gone = case.hidden + case.withheld
    shared = {name: value.detach() for name, value in real.items() if not begins(name, gone)}
    shared = noisy(shared, case.noise, case.variance, how.seed + number)
    return attempt(case, model, params, shared, x, labels, how)


def attempt(
    case: Case,
    model: SplitModel,
    params: Mapping[str, Tensor],
    shared: Tensors,
    x: Tensor,
    labels: list[int],
    how: Settings,
) -> Attempt:
    """Attack a ``shared`` gradient from several starts. The attacker draws its own weights for hidden layers."""
    began, guess = time.perf_counter(), dict(params)
    if case.hidden:
        model = sigmoid_lenet(x.shape[1], (x.shape[2], x.shape[3]), model.num_classes, how.seed + 1, case.at - 1)
        guess = {n: v if begins(n, case.hidden) else params[n] for n, v in weights_of(model).items()}
    known = [label_of(shared)] if case.attack == "idlg" else None
    draws = [how.seed * how.starts + start for start in range(how.starts)]
    searched = tuple(name for name in guess if case.searched and begins(name, case.hidden))
    found = [
        invert(model, guess, shared, tuple(x.shape), labels=known, steps=how.steps, seed=seed, searched=searched)
        for seed in draws
    ]
    ordered = [match_images(one, x) for one in found]
    best = min(range(len(found)), key=lambda k: found[k].loss)
    errors = np.array([[compute_mse(p, t) for p, t in zip(pictures, x.numpy(), strict=True)] for pictures, _ in ordered])
    pictures, names = ordered[best]
    curve, seconds = errors_by_step(found[best], x), time.perf_counter() - began
    return Attempt(pictures, names, found[best].loss, errors.min(0), found[best].steps, seconds, curve)


def errors_by_step(found: Found, x: Tensor) -> np.ndarray:
    """Return the errors (steps + 1, b) of an attack's images on its way, cut to [0, 1], in the order of the true images x."""
    order = match_order(found, x)
    path = [torch.nan_to_num(images, nan=0.5).clamp(0, 1).numpy()[order] for images in found.path]
    return np.array([[compute_mse(p, t) for p, t in zip(images, x.numpy(), strict=True)] for images in path])


def match_images(found: Found, x: Tensor) -> tuple[np.ndarray, list[int]]:
    """Return the found images, cut to [0, 1], with their labels, in the order that fits the true images x best."""
    pictures, order = torch.nan_to_num(found.images, nan=0.5).clamp(0, 1).numpy(), match_order(found, x)
    return pictures[order], [found.labels[k] for k in order]


def match_order(found: Found, x: Tensor) -> list[int]:
    """Return which found image fits each true image x (b, C, H, W), by the smallest sum of errors."""
    pictures = torch.nan_to_num(found.images, nan=0.5).clamp(0, 1).numpy()
    cost = [[compute_mse(true, picture) for picture in pictures] for true in x.numpy()]
    order: list[int] = linear_sum_assignment(cost)[1].tolist()
    return order


def rows_of(tried: Attempt, x: Tensor, labels: list[int]) -> list[dict[str, Any]]:
    """Return a row per image: the attacker's errors, and the error of a picture of one colour."""
    rows = []
    for k, (picture, true) in enumerate(zip(tried.pictures, x.numpy(), strict=True)):
        error, best_error = compute_mse(picture, true), float(tried.best_mse[k])
        constant_error = compute_mse(true.mean((1, 2), keepdims=True), true)
        found = {"label": labels[k], "label_found": tried.labels[k], "loss": tried.loss, "mse": error}
        found |= {"psnr": compute_psnr(error), "ssim": compute_ssim(picture, true), "best_mse": best_error}
        found |= {"best_psnr": compute_psnr(best_error), "constant_psnr": compute_psnr(constant_error)}
        rows.append(found | {"steps_taken": tried.steps, "seconds": round(tried.seconds, 1)})
    return rows


def compute_mse(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean squared difference of two pictures of one shape."""
    return float(np.square(np.subtract(a, b, dtype=np.float64)).mean())


def compute_psnr(error: float) -> float:
    """Return the peak signal-to-noise ratio in dB of a mean squared error between pictures in [0, 1]. It is infinite at 0."""
    return math.inf if error == 0 else -10 * math.log10(error)


def compute_ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean structural similarity of pictures (C, H, W) in [0, 1], with the window of Wang et al. 2004."""
    from torchmetrics.functional.image import structural_similarity_index_measure  # which takes a second

    first, second = (torch.as_tensor(picture, dtype=torch.float64).unsqueeze(0) for picture in (a, b))
    similarity = structural_similarity_index_measure(first, second, data_range=1.0)
    assert isinstance(similarity, torch.Tensor)  # a tuple only if the whole image of similarities is asked for
    return float(similarity)
