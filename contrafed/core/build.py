"""Build the chosen model, check it, and try it on two images."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from contrafed.core import registry, split_model
from contrafed.core.buffers import prepare_buffers
from contrafed.core.client_run import Choice, model_settings
from contrafed.core.drawn import drops
from contrafed.core.errors import UserError
from contrafed.core.randomness import torch_generator
from contrafed.core.split_model import SplitModel, Stages
from contrafed.core.trial import (
    find_changed_in_evaluation,
    find_copy_fault,
    find_inactive,
    find_padding_influence,
    find_training_fault,
    find_uninitialised,
    find_untrained,
    keeping_buffers,
    lay_out,
    own_name,
    place_outside,
)
from contrafed.core.weights import freeze, load_pretrained

MIN_SIDE_PX = 8  # pixels of the shorter side
WRONG_CODE = (AttributeError, ImportError, NameError, TypeError)  # errors that no other inputs avoid


class InputsError(UserError):
    """A network that cannot be built for these inputs. It may be built for others."""


def build_model(
    choice: Choice, in_channels: int, image_size: tuple[int, int], num_classes: int, seed: int, *, tried: bool = True
) -> SplitModel:
    """Build the chosen model for images of one size. The initial weights are a pure function of ``seed``.

    Args:
        choice: The choice in the group ``model``.
        in_channels: 1 or 3.
        image_size: Height and width in pixels.
        num_classes: C.
        seed: The run's seed.
        tried: Run it on two images.

    Raises:
        UserError: For unsupported images, for a result that is not a ``SplitModel``, or for layers that do not fit the images
            or each other.
    """
    settings = model_settings(choice.values)
    if settings.image_size is not None:
        image_size = (settings.image_size, settings.image_size)
    if min(image_size) < MIN_SIDE_PX or in_channels not in (1, 3):
        raise UserError(
            f"model={choice.name} takes images of at least {MIN_SIDE_PX}x{MIN_SIDE_PX} with 1 or 3 channels, "
            f"got {image_size[0]}x{image_size[1]} with {in_channels}"
        )
    said = f"images of {in_channels}x{image_size[0]}x{image_size[1]}"
    with use_seed(seed):
        model = call_build(choice, in_channels, image_size, num_classes, said)
        if settings.image_size is not None:
            model.image_size = image_size
        if tried:
            try_model(choice, model, torch.zeros(2, *image_size, model.takes_channels or in_channels).movedim(-1, 1))
    return model


@contextmanager
def use_seed(seed: int) -> Iterator[None]:
    """Draw initial weights from a run's seed, and restore torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed the accelerators, which fork_rng does not restore here.
        torch.default_generator.manual_seed(torch_generator(seed, "model init").initial_seed())
        yield


def call_build(choice: Choice, in_channels: int, size: tuple[int, ...], num_classes: int, said: str) -> SplitModel:
    """Return what a model's ``build`` makes, checked. ``said`` names the inputs in an error.

    Raises:
        InputsError: For an error that other inputs may avoid.
        UserError: For other errors.
    """
    try:
        model: SplitModel = choice.module.build(choice.config, in_channels, size, num_classes)
    except UserError as error:
        if not choice.is_own:
            raise
        raise InputsError(str(error), error.key) from error
    except Exception as error:  # layers that do not fit, too little memory, or an error in the user's code
        raises = traceback.extract_tb(error.__traceback__)[-1].filename
        kind = UserError if isinstance(error, WRONG_CODE) or raises == split_model.__file__ else InputsError
        raise kind(f"model={choice.name} cannot be built for {said}: {describe_fault(error, choice)}") from error
    check_built(choice, model, num_classes)
    return model


def describe_fault(error: Exception, choice: Choice) -> str:
    """Return the error of a model's code in one line, with type and place unless it comes from torch or from the machine.

    The place is in the model's file, or in that of the network that it takes.
    """
    line = next(iter(str(error).splitlines()), "")
    if _takes_network(choice) and (own := place_outside(error, str(choice.module.__file__))):
        return f"{type(error).__name__}: {line} ({own})"
    if isinstance(error, RuntimeError | MemoryError):
        return line
    where = registry.line_in(str(choice.module.__file__), error)
    return f"{type(error).__name__}: {line} ({where.filename}, line {where.lineno})"


def check_built(choice: Choice, model: Any, num_classes: int) -> None:
    """Raise ``UserError`` if the built object is not a model that every method can train."""
    said = _explain_build(choice)
    if not isinstance(model, SplitModel):
        raise UserError(f"{said}, got {type(model).__name__}")
    if fault := find_uninitialised(model):
        raise UserError(f"model={choice.name}: {fault}")
    if not isinstance(model.encoder, Stages):
        raise UserError(f"{said} whose encoder is a contrafed.core.split_model.Stages, got {type(model.encoder).__name__}")
    if model.num_classes != num_classes:
        raise UserError(f"{said} with {num_classes} outputs (num_classes), got {model.num_classes}")
    parts = ("encoder", "projector", "classifier")
    if outside := [name for name, _ in model.named_parameters() if name.partition(".")[0] not in parts]:
        raise UserError(f"{said} without parameters beside {', '.join(parts)}, got {outside[0]}")
    names = {name for name, _ in model.named_parameters()}
    if twice := [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in names]:
        raise UserError(f"{said} that has each parameter once, got {twice[0]}, which it has by another name too")
    if fixed := [name for name, value in model.named_parameters() if not value.requires_grad]:
        raise UserError(
            f"{said} whose parameters require a gradient, got {fixed[0]}. "
            "Fix: model.freeze with such names, in place of requires_grad_(False)"
        )
    unsized = [name for name, value in model.named_parameters() if nn.parameter.is_lazy(value)]
    if unsized:
        raise UserError(
            f"{said} whose layers know their sizes, got {unsized[0]} without; "
            "contrafed.core.split_model.features_of counts them"
        )
    if outside := [name for name, _ in model.named_buffers() if name.partition(".")[0] not in parts]:
        raise UserError(f"{said} without buffers beside {', '.join(parts)}, got {outside[0]}")
    settings = model_settings(choice.values)
    loaded = [] if settings.pretrained is None else load_pretrained(model, settings.pretrained)
    model.notices = (*loaded, *freeze(model, settings.freeze))
    if fault := prepare_buffers(model):
        raise UserError(f"{_key_of(choice)}: {fault}")
    model.eval()
    model.buffers_are = settings.buffers
    if model.buffers_are != "average" and not model.buffer_names:
        raise UserError(f"model.buffers={model.buffers_are}: model={choice.name} has no buffers. Fix: leave it out")
    layers = model.named_modules()
    random = [name for name, layer in layers if layer is not model and drops(layer)]
    if random:  # methods draw a round's masks themselves
        raise UserError(f"{said} without layers of dropout, got {random[0]}; give SplitModel its dropout=RATE")


def _key_of(choice: Choice) -> str:
    """Return the beginning of an error about a network: the key that names another one."""
    return "model.target" if _takes_network(choice) else f"model={choice.name}"


def _takes_network(choice: Choice) -> bool:
    """Return whether a model is a network of somebody else, named by ``model.target``."""
    return hasattr(choice.config, "target")


def _check_evaluation(choice: Choice, model: SplitModel, part: str, inputs: Tensor) -> None:
    """Raise ``UserError`` if a part of the model changes a buffer in evaluation, which all clients would share."""
    if changed := find_changed_in_evaluation(model.get_submodule(part), inputs):
        name = own_name(model, f"{part}.{changed}")
        fix = "Fix: change it only if self.training"
        raise UserError(f"{_key_of(choice)}: its forward pass changes {name} in evaluation too. {fix}")


def _explain_build(choice: Choice) -> str:
    return f"model={choice.name}: {choice.module.__name__}.build must return a contrafed.core.split_model.SplitModel"


def try_model(choice: Choice, model: SplitModel, images: Tensor) -> None:
    """Raise ``UserError`` if a model cannot compute features of ``images`` (b, C, H, W), or cannot train on clients.

    What it begins with stays. If its clients cannot train as a stack, ``model.one_by_one`` has the reason.
    """
    count, width = len(images), model.embedding_size
    try:
        with torch.no_grad(), keeping_buffers(model):
            _check_evaluation(choice, model, "encoder", images)
            if fault := model.encoder.find_fault(lay_out(torch.linspace(-1, 1, images.numel()).view(images.shape), images)):
                raise UserError(fault)
            encoded = model.encoder(images)
            z = model.projector(encoded)
            _check_evaluation(choice, model, "projector", encoded)
            fault = find_training_fault(model, images) if model.buffer_names else ""
            if model.buffer_names and not fault:
                model.one_by_one = find_padding_influence(model, images)
            if choice.is_own and not fault:
                fault = find_inactive(model, images)
            if (choice.is_own or _takes_network(choice)) and not fault:
                fault = find_copy_fault(model, images)
            untrained = find_untrained(model, images) if _takes_network(choice) and not fault else ""
    except UserError:
        raise
    except Exception as error:  # any error of layers that do not fit each other, or of a user's own
        shape = "x".join(map(str, images.shape[1:]))
        raise UserError(f"model={choice.name} cannot take images of {shape}: {describe_fault(error, choice)}") from error
    if fault:
        raise UserError(f"{_key_of(choice)}: {fault}")
    about = (f"clients train one by one, because {model.one_by_one}" if model.one_by_one else "", untrained)
    model.notices = (*model.notices, *(f"model={choice.name}: {line}" for line in about if line))
    if z.shape != (count, width):
        wanted = f"whose classifier gets ({count}, {width}) of {count} images, got {tuple(z.shape)}"
        raise UserError(
            f"{_explain_build(choice)} {wanted}" + ("; nn.Flatten() makes a row of each image" if z.dim() != 2 else "")
        )
    if encoded.dim() != 2:
        rows = f"whose encoder makes a row of each image, ({count}, E), got {tuple(encoded.shape)}"
        raise UserError(f"{_explain_build(choice)} {rows}; a pool or nn.Flatten() belongs in its last tail")
