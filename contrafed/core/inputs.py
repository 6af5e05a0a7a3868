"""Describe what a network takes: images, other numbers such as a table's rows or a sensor's signals, or tokens."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from contrafed.core.build import build_model, call_build, try_model, use_seed
from contrafed.core.client_run import Choice, model_settings
from contrafed.core.errors import UserError
from contrafed.core.split_model import SplitModel

Kind = Literal["image", "values", "tokens"]

# Of an example that a network is tried with before the data are known.
EXAMPLES = {"values": (9, 128), "tokens": (1, 16)}
NUM_EXAMPLE_TOKENS = 100


@dataclass(frozen=True)
class Inputs:
    """The shape of an example."""

    kind: Kind
    shape: tuple[int, ...]  # without the example's axis: (C, H, W) of images, (1, n) of a table's row or of tokens
    num_tokens: int = 0  # how many different tokens there are

    @property
    def channels(self) -> int:
        """The argument ``in_channels`` of a network's ``build``: of tokens their number, else the first axis."""
        return self.num_tokens if self.kind == "tokens" else self.shape[0]

    @property
    def size(self) -> tuple[int, ...]:
        """The argument ``image_size`` of a network's ``build``: the axes after the channels."""
        return self.shape[1:]

    def example(self, count: int) -> Tensor:
        """Return examples of zeros (count, ...)."""
        return torch.zeros(count, *self.shape, dtype=torch.int64 if self.kind == "tokens" else torch.float32)

    def __str__(self) -> str:
        if self.kind == "image":
            return f"images of {'x'.join(map(str, self.shape))}"
        shape = "x".join(map(str, self.shape[1:] if self.shape[0] == 1 else self.shape))
        return f"{shape} {'numbers' if self.kind == 'values' else 'tokens'}"


def accepted_kinds(choice: Choice) -> tuple[str, ...]:
    """Return the kinds of inputs that a network takes: ``INPUTS`` of its module, by default images."""
    return tuple(getattr(choice.module, "INPUTS", ("image",)))


def example_inputs(choice: Choice, image: tuple[int, int, int]) -> Inputs:
    """Return inputs that a network takes, by which it is tried without data. ``image`` is the shape (C, H, W) of images."""
    kind = accepted_kinds(choice)[0]
    if kind == "image":
        return Inputs("image", image)
    return Inputs("tokens" if kind == "tokens" else "values", EXAMPLES[kind], NUM_EXAMPLE_TOKENS if kind == "tokens" else 0)


def check_accepts(choice: Choice, inputs: Inputs) -> None:
    """Raise ``UserError`` if a network does not take inputs of this kind, or for ``model.image_size`` without images."""
    if inputs.kind not in accepted_kinds(choice):
        fit = {"image": "cnn", "values": "mlp or cnn1d", "tokens": "embedding_bag"}[inputs.kind]
        numbers = "dataset.kind=values for numbers, " if inputs.kind == "tokens" else ""
        raise UserError(
            f"model={choice.name} takes no {inputs.kind}, and an example is {inputs}. Fix: model={fit}, {numbers}or in a "
            f"network of yours INPUTS = ('{inputs.kind}',)"
        )
    if inputs.kind != "image" and (size := model_settings(choice.values).image_size) is not None:
        raise UserError(f"model.image_size={size} resizes images, and an example is {inputs}. Fix: model.image_size=null")


def build_model_for(choice: Choice, inputs: Inputs, num_classes: int, seed: int, *, tried: bool = True) -> SplitModel:
    """Build the chosen model for any inputs. The initial weights are a pure function of ``seed``.

    Args:
        choice: The choice in the group ``model``.
        inputs: What an example is.
        num_classes: C.
        seed: The run's seed.
        tried: Run it on two examples.

    Raises:
        UserError: For inputs that the network does not take, or as ``build_model``.
    """
    check_accepts(choice, inputs)
    if inputs.kind == "image":
        return build_model(choice, inputs.channels, (inputs.shape[1], inputs.shape[2]), num_classes, seed, tried=tried)
    with use_seed(seed):
        model = call_build(choice, inputs.channels, inputs.size, num_classes, str(inputs))
        if tried:
            try_model(choice, model, inputs.example(2))
    return model
