"""Between tensors and Flower's records: one codec for every method and every engine.

Flower's ``Array`` holds bytes made by ``numpy.save``. Between our own workers those bytes are never needed, so a message
carries ``TensorArray``, an ``Array`` that serialises itself only when it leaves for a real device.
"""

import pickle
import warnings
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from contrafed.core.tensors import on_host

# Ray hands arrays over as read-only views of shared memory. We never write to what was received, so torch's reminder that
# this would be undefined tells the user nothing. It comes once per process: let it come here, unheard.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(4), dtype=np.float32))

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
# Among what a node says of itself in CONFIG: where its loss or weights stopped being finite.
DIVERGED = "diverged"
# And a line for who follows the run.
NOTE = "note"
MOST = 600  # characters of what a node says in words


def words(said: object) -> str:
    """Return what a node says, fit to be shown: not too long, and without characters that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(said)[:MOST])


class TensorArray(Array):
    """A Flower ``Array`` around a tensor, with the bytes made on demand."""

    stype = "numpy.ndarray"

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__["tensor"] = tensor.detach()

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """The type's name."""
        return str(self.__dict__["tensor"].dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape."""
        return tuple(self.__dict__["tensor"].shape)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The wire form: the bytes of a ``.npy`` file."""
        buffer = BytesIO()
        np.save(buffer, self.numpy(), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray:
        """Return the values; a view, not a copy, for a tensor on the CPU."""
        tensor: Tensor = self.__dict__["tensor"]
        return tensor.cpu().numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as a NumPy array so that Ray shares the memory instead of copying it.
        values = self.numpy()
        return _from_numpy, (values if values.flags.c_contiguous else values.copy(),)


# Flower writes the class name into the wire form and the receiver looks it up: there this is a plain Array.
TensorArray.__qualname__ = Array.__qualname__


def _from_numpy(values: np.ndarray) -> TensorArray:
    return TensorArray(torch.from_numpy(values))


def reduce_record(record: ArrayRecord) -> Any:
    """What pickle makes of a record, its memory as buffers: all arrays at a time, a third of the work of one by one."""
    if not all(isinstance(array, TensorArray) for array in record.values()):
        return record.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    values = [tensor.contiguous().numpy() for tensor in on_host(from_record(record)).values()]
    about = tuple((name, value.dtype.str, value.shape) for name, value in zip(record, values, strict=True))
    return _from_buffers, (about, [pickle.PickleBuffer(value.data) for value in values])


def _from_buffers(about: Iterable[tuple[str, str, tuple[int, ...]]], buffers: Iterable[Any]) -> ArrayRecord:
    pairs = zip(about, buffers, strict=True)
    return to_record({name: torch.from_numpy(np.ndarray(shape, kind, buffer)) for (name, kind, shape), buffer in pairs})


def to_tensor(array: Array) -> Tensor:
    """Return the tensor of a Flower ``Array``; shares memory where it can, so never write to it."""
    if isinstance(array, TensorArray):
        tensor: Tensor = array.__dict__["tensor"]
        return tensor
    return torch.from_numpy(array.numpy())


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return named tensors as an ``ArrayRecord``."""
    record = ArrayRecord()
    # Adding them one by one has Flower check each type, which takes longer than anything else about a small message.
    record.__dict__["_data"].update((name, TensorArray(tensor)) for name, tensor in tensors.items())
    return record


def from_record(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return an ``ArrayRecord`` as named tensors."""
    return {name: to_tensor(array) for name, array in record.items()}


def state_of(content: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of one array record of a message or a node's state; empty when there is none."""
    record = content.get(name)
    return from_record(record) if isinstance(record, ArrayRecord) else {}


def config_of(message: Message) -> dict[str, Any]:
    """Return the scalars that came with a message."""
    record = message.content.get(CONFIG)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def to_list(names: Iterable[str], tensors: Mapping[str, Tensor]) -> list[np.ndarray]:
    """Return tensors as a NumPyClient's list, in the order of the method's declared names."""
    return [tensors[name].detach().cpu().numpy() for name in names]


def from_list(names: Iterable[str], values: Iterable[np.ndarray]) -> dict[str, Tensor]:
    """Return a NumPyClient's list as named tensors; raises ``ValueError`` when the two differ in length."""
    return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(names, values, strict=True)}
