"""Convert between tensors and Flower's records: one codec for every method and every engine.

Flower's ``Array`` holds bytes made by ``numpy.save``. Contrafed's own workers do not need those bytes. Their messages carry
``TensorArray``, an ``Array`` that is serialised only when it is sent to a real device.
"""

import pickle
import warnings
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from contrafed.core.tensors import on_host

# Ray passes arrays as read-only views of shared memory. We never write to received arrays, so torch's warning about that does
# not help the user. torch warns once per process: trigger and suppress the warning here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(4), dtype=np.float32))

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord, RecordDict)

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
# A client's entry in CONFIG: where its loss or weights stopped being finite.
DIVERGED = "diverged"
# A client's entry in CONFIG: one line for the console.
NOTE = "note"
MAX_NOTE_CHARACTERS = 600  # characters of a text from a client


def words(said: object) -> str:
    """Return a client's text ready to print: cut to ``MAX_NOTE_CHARACTERS`` characters, without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(said)[:MAX_NOTE_CHARACTERS])


class KnownNorm(NamedTuple):
    """The L2 norm of a tensor, as long as the tensor is not changed in place."""

    tensor: Tensor
    version: int  # of the tensor's content
    norm: float

    def get(self, tensor: Tensor) -> float | None:
        """Return the norm if it is that of ``tensor``."""
        return self.norm if tensor is self.tensor and tensor._version == self.version else None


class TensorArray(Array):
    """A Flower ``Array`` around a tensor. Its bytes are made on demand.

    ``norm`` is the tensor's L2 norm, if its stack has computed it. Ray's workers send it to the driver. Devices cannot send it.
    """

    stype = "numpy.ndarray"

    def __init__(self, tensor: Tensor, norm: float | None = None) -> None:
        self.__dict__["tensor"] = tensor.detach() if tensor.requires_grad else tensor
        self.__dict__["norm"] = norm

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """The name of the tensor's type."""
        return str(self.__dict__["tensor"].dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The tensor's shape."""
        return tuple(self.__dict__["tensor"].shape)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The serialised form: the bytes of a ``.npy`` file."""
        buffer = BytesIO()
        np.save(buffer, self.numpy(), allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray:
        """Return the values. For a tensor on the CPU this is a view, not a copy."""
        tensor: Tensor = self.__dict__["tensor"]
        return tensor.cpu().numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickled as a NumPy array so that Ray shares the memory instead of copying it.
        values = self.numpy()
        return _from_numpy, (values if values.flags.c_contiguous else values.copy(),)


# Flower writes the class name into the serialised form, and the receiver looks it up. There it must be a plain Array.
TensorArray.__qualname__ = Array.__qualname__


def _from_numpy(values: np.ndarray) -> TensorArray:
    return TensorArray(torch.from_numpy(values))


def reduce_record(record: ArrayRecord) -> Any:
    """Return what pickle needs to rebuild a record, with its memory as buffers.

    All arrays are reduced together, which takes a third of the time of one by one.
    """
    if not all(isinstance(array, TensorArray) for array in record.values()):
        return record.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    values = [tensor.contiguous().numpy() for tensor in on_host(from_record(record)).values()]
    norms = [array.__dict__["norm"] for array in record.values()]
    about = tuple((name, v.dtype.str, v.shape, norm) for name, v, norm in zip(record, values, norms, strict=True))
    return _from_buffers, (about, [pickle.PickleBuffer(value.data) for value in values])


def _from_buffers(about: Iterable[tuple[str, str, tuple[int, ...], float | None]], buffers: Iterable[Any]) -> ArrayRecord:
    pairs = zip(about, buffers, strict=True)
    arrays = ((name, torch.from_numpy(np.ndarray(shape, kind, own)), norm) for (name, kind, shape, norm), own in pairs)
    return make_record(ArrayRecord, [(name, TensorArray(tensor, norm)) for name, tensor, norm in arrays])


def to_tensor(array: Array) -> Tensor:
    """Return the tensor of a Flower ``Array``. It may share memory with the array, so never write to it."""
    if isinstance(array, TensorArray):
        tensor: Tensor = array.__dict__["tensor"]
        return tensor
    return torch.from_numpy(array.numpy())


def make_record(kind: type[Record], values: Iterable[tuple[str, Any]]) -> Record:
    """Return a record with values whose types are known. Flower's check of each takes most of the time of a small message."""
    record = kind()
    record.__dict__["_data"].update(values)
    return record


def to_record(tensors: Mapping[str, Tensor], norms: Mapping[str, KnownNorm] | None = None) -> ArrayRecord:
    """Return named tensors as an ``ArrayRecord``, with their L2 norms if these are known."""
    if not norms:
        return make_record(ArrayRecord, [(name, TensorArray(tensor)) for name, tensor in tensors.items()])
    known = [norms[name].get(tensor) if name in norms else None for name, tensor in tensors.items()]
    pairs = zip(tensors.items(), known, strict=True)
    return make_record(ArrayRecord, [(name, TensorArray(tensor, norm)) for (name, tensor), norm in pairs])


def from_record(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return an ``ArrayRecord`` as named tensors."""
    return {name: to_tensor(array) for name, array in record.items()}


def state_of(content: RecordDict, name: str) -> dict[str, Tensor]:
    """Return the tensors of one array record of a message or of a client's state, empty if there is none."""
    record = content.get(name)
    return from_record(record) if isinstance(record, ArrayRecord) else {}


def config_of(message: Message) -> dict[str, Any]:
    """Return the scalars of a message."""
    record = message.content.get(CONFIG)
    return dict(record) if isinstance(record, ConfigRecord) else {}


def to_list(names: Iterable[str], tensors: Mapping[str, Tensor]) -> list[np.ndarray]:
    """Return tensors as the list of a NumPyClient, in the order of ``names``."""
    return [tensors[name].detach().cpu().numpy() for name in names]


def from_list(names: Iterable[str], values: Iterable[np.ndarray]) -> dict[str, Tensor]:
    """Return the list of a NumPyClient as named tensors.

    Raises:
        ValueError: If names and values differ in number.
    """
    return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(names, values, strict=True)}
