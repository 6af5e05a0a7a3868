"""Personal models as files: one per node, on the node's own disk, so that they never cross the network."""

import os
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from contrafed import codec

Tensors = dict[str, Tensor]


def personal_file(folder: str | Path, node: int) -> Path:
    """Return where the model of a node (partition id) is."""
    return Path(folder) / f"{node}.safetensors"


def write_personal(folder: str, node: int, model: Tensors, received: Tensors) -> None:
    """Write a node's ``model`` and what it ``received`` beside a model, such as prototypes; replaces a file whole."""
    target = personal_file(folder, node)
    target.parent.mkdir(parents=True, exist_ok=True)
    rest = {name: value for name, value in received.items() if not name.startswith("model/")}
    tensors = {f"model/{name}": value for name, value in model.items()} | rest
    whole = target.with_suffix(".part")
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, whole, {"node": str(node)})
    os.replace(whole, target)


def read_personal(folder: str, node: int) -> tuple[Tensors, Tensors]:
    """Return what ``write_personal`` wrote: the model by tensor name, and the rest by message name."""
    tensors = load_file(personal_file(folder, node))
    return codec.group(tensors, "model"), {name: value for name, value in tensors.items() if not name.startswith("model/")}


def shapes_in(folder: str, node: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a saved model's tensors by name, without reading them."""
    with safe_open(personal_file(folder, node), "pt") as file:
        names = [name for name in file.keys() if name.startswith("model/")]  # noqa: SIM118  no mapping
        return {name.removeprefix("model/"): tuple(file.get_slice(name).get_shape()) for name in names}
