"""Initial weights of a model from a file (``model.pretrained``), and parameters that stay as they are (``model.freeze``)."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from contrafed.core.errors import UserError, nearest
from contrafed.core.tensors import Tensors

HEAD = ("classifier.weight", "classifier.bias")
WRAPPED = ("state_dict", "model")  # keys under which training scripts save a state dict
SAVE = "torch.save(network.state_dict(), FILE), or save_file of safetensors"


def load_pretrained(model: Any, path: str) -> list[str]:
    """Copy the tensors of a file into a ``SplitModel``, and return notices about a head that is left as drawn.

    The file has the names of the network's own state dict, or those of a run's model.safetensors. A head with another number
    of classes is left as drawn, and so is one that the file lacks.

    Args:
        model: The model. Its ``own_names`` maps the network's own names to the model's.
        path: A safetensors file, or a state dict as ``torch.load(weights_only=True)`` reads it.

    Raises:
        UserError: For a file that cannot be read, or tensors that are missing, unexpected or of another shape.
    """
    file = Path(path).expanduser()
    found = {model.own_names.get(name, name): value for name, value in read_weights(path).items()}
    wanted, where = model.state_dict(keep_vars=True), f"model.pretrained: {file}"
    own = {name: theirs for theirs, name in model.own_names.items()}
    notices, fresh = [], {name for name in HEAD if name in wanted}
    there = fresh & found.keys()
    if not there:
        notices.append(f"{where} has no head, so the head starts as drawn")
    elif _other_classes(found, wanted):
        classes = f"{len(found[HEAD[0]])} classes in the file, {len(wanted[HEAD[0]])} here"
        notices.append(f"{where}: {classes}, so the head starts as drawn")
    else:
        fresh = set()
    needed = [name for name, value in wanted.items() if value.is_floating_point()]  # tables and counters may be left out
    missing = [name for name in needed if name not in found and name not in fresh]
    if missing:
        shown = own.get(missing[0], missing[0])
        given = f", or in build model.own_names, which maps the file's names, such as {next(iter(found))}, to these"
        raise UserError(
            f"{where} lacks {len(missing)} of the network's {len(needed)} tensors, such as {shown}"
            f". Fix: a file of the same network{'' if own else given}"
        )
    if more := sorted(found.keys() - wanted.keys()):
        raise UserError(f"{where} has tensors that the network has not: {len(more)}, such as {more[0]}. Fix: leave them out")
    for name in found.keys() - fresh:
        if found[name].shape != wanted[name].shape:
            shapes = f"{tuple(found[name].shape)}, the network has {tuple(wanted[name].shape)}"
            raise UserError(f"{where}: {own.get(name, name)} has shape {shapes}. Fix: the arguments with which it was trained")
        if not bool(found[name].isfinite().all()):
            raise UserError(f"{where}: {own.get(name, name)} is not finite. Fix: another file")
    with torch.no_grad():
        for name in found.keys() - fresh:
            wanted[name].copy_(found[name])
    return notices


def _other_classes(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Return whether a file's head fits except for its number of classes."""
    shapes = [(tuple(found[name].shape), tuple(wanted[name].shape)) for name in HEAD if name in found and name in wanted]
    return all(a[1:] == b[1:] for a, b in shapes) and any(a[:1] != b[:1] for a, b in shapes)


def read_weights(path: str) -> Tensors:
    """Return the tensors of a file by name. Raises ``UserError``."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"model.pretrained: there is no file {file}")
    try:
        found: Any = load_file(file)
    except (SafetensorError, ValueError, OSError):
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises many types for a file that is none
            why = "neither a safetensors file nor a state dict that torch.load(weights_only=True) reads"
            raise UserError(f"model.pretrained: {file} is {why}. Fix: {SAVE}") from error
    for key in WRAPPED:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"model.pretrained: {file} has no tensors by name. Fix: {SAVE}")
    parallel = "module." if all(name.startswith("module.") for name in found) else ""  # of nn.DataParallel
    return {name.removeprefix(parallel): value.to_dense() for name, value in found.items()}


def freeze(model: Any, patterns: tuple[str, ...]) -> list[str]:
    """Make the tensors of a ``SplitModel`` constants whose names a pattern fits, and return a notice about them.

    A constant neither trains nor is sent, and a stack of clients has it once. Patterns are compared, as ``fnmatch`` does, with
    the model's own names and with those of the network that it is made of.

    Raises:
        UserError: For a pattern that fits no parameter, or if no parameter is left to train.
    """
    if not patterns:
        return []
    own = {name: theirs for theirs, name in model.own_names.items()}
    tensors = model.state_dict(keep_vars=True)
    total = sum(value.numel() for value in model.parameters())
    chosen = set()
    for pattern in patterns:
        fits = {n for n in tensors if fnmatchcase(n, pattern) or (n in own and fnmatchcase(own[n], pattern))}
        if not any(isinstance(tensors[name], nn.Parameter) for name in fits):
            names = [own.get(name, name) for name, value in tensors.items() if isinstance(value, nn.Parameter)]
            if any(name.startswith(f"{pattern}.") for name in (*names, *tensors)):
                raise UserError(f"model.freeze: {pattern} is a layer or part, not a parameter. Fix: {pattern}.*")
            if pattern.startswith("!"):
                raise UserError(
                    f"model.freeze: {pattern} leaves out, which only shared_parts knows. Fix: what to freeze, such as encoder.*"
                )
            line = f"model.freeze: {pattern} fits no parameter{nearest(pattern, names).removesuffix('?')}"
            raise UserError(f"{line}. Fix: a pattern of names such as {names[0]}")
        chosen |= fits
    for name in sorted(chosen):
        make_constant(model, name)
    model.frozen_names = frozenset(chosen)
    left = sum(value.numel() for value in model.parameters())
    if not left:
        raise UserError(
            f"model.freeze={list(patterns)} leaves no parameter to train. Fix: leave the head out, as encoder.* does"
        )
    return [f"model.freeze: {total - left:,} of {total:,} parameters are frozen: they neither train nor are sent"]


def make_constant(module: nn.Module, name: str) -> None:
    """Turn a parameter or buffer into a buffer that the ``state_dict`` leaves out."""
    path, _, leaf = name.rpartition(".")
    home = module.get_submodule(path)
    if leaf in home._parameters:
        value = home._parameters.pop(leaf)
        assert value is not None
        home.register_buffer(leaf, value.detach(), persistent=False)
    else:
        home._non_persistent_buffers_set.add(leaf)
