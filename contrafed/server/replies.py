"""Check the replies of a round, and compute the sums of replies that strategies use."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from torch import Tensor
from torch.nn.utils import get_total_norm

from contrafed.core import codec
from contrafed.core.errors import unknown
from contrafed.core.tensors import Tensors, select_prefix
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.aggregation import Aggregation

# A .npy header of ours has 128 bytes. A longer one than this is invalid.
MAX_NPY_HEADER_BYTES = 4096
# Characters shown of a client's text.
MAX_SHOWN_CHARACTERS = 200
# Largest size of a reply in addition to its tensors, in bytes: metadata, metrics, and a failed client's text.
MAX_REPLY_OVERHEAD_BYTES = 2**20

# Largest absolute value of a loss or another number: float32's, in which clients train.
MAX_NUMBER = float(np.finfo(np.float32).max)

# The cause of rejection for a diverged client.
NOT_FINITE = "not finite"

# Either of them can be uploaded in place of the other.
OTHER_PREFIX = {"model": "delta", "delta": "model"}


class AbsentError(ValueError):
    """A strategy sums tensors that clients do not upload."""


@dataclass
class Reply:
    """One client's valid reply."""

    client: int
    tensors: Tensors  # by the names that the client declares, NAME/x
    num_examples: int
    metrics: dict[str, float]
    received: Tensors = field(default_factory=dict)  # tensors that this client received, NAME/x
    norm: float = 0.0  # joint L2 norm of the tensors, without counters

    def get_tensors(self, name: str) -> Tensors:
        """Return the tensors ``NAME/x`` under the name x. ``model`` and ``delta`` are computed from each other if needed.

        A delta is the uploaded model minus the received one, as the client itself would have computed it.
        """
        found, other = select_prefix(self.tensors, name), OTHER_PREFIX.get(name)
        if found or other is None:
            return found
        sent, base = select_prefix(self.tensors, other), select_prefix(self.received, "model")
        if missing := sent.keys() - base.keys():
            raise ValueError(
                f"{name}/{min(missing)} is not known: the client sends {other}/{min(missing)} but received no model"
            )
        if name == "delta":
            return {x: tensor - base[x].to(tensor.device) for x, tensor in sent.items()}
        return {x: base[x].to(tensor.device) + tensor for x, tensor in sent.items()}

    def start_model(self, like: Tensors) -> Tensors:
        """Return this client's model before its local update, with the names and devices of ``like``."""
        return {name: self.received[f"model/{name}"].to(value.device) for name, value in like.items()}


class Replies(Sequence[Reply]):
    """The valid replies of a round, sorted by partition id so that sums do not depend on the order of arrival."""

    def __init__(self, replies: Iterable[Reply], aggregation: Aggregation | None = None) -> None:
        """Sort the replies. ``aggregation`` replaces means of them, and None keeps the mean."""
        self.aggregation = aggregation
        self.largest_share = math.nan  # of one client in a sum of this round, by absolute weights
        self._replies = sorted(replies, key=lambda reply: reply.client)

    def __len__(self) -> int:
        return len(self._replies)

    def __getitem__(self, index: Any) -> Any:
        return self._replies[index]

    @property
    def clients(self) -> np.ndarray:
        """Partition ids (m,)."""
        return np.array([reply.client for reply in self._replies], dtype=np.int64)

    @property
    def device(self) -> torch.device | None:
        """The device of the replies' tensors, None without any."""
        return next((tensor.device for reply in self._replies for tensor in reply.tensors.values()), None)

    @property
    def num_examples(self) -> np.ndarray:
        """Training examples per reply (m,), float64."""
        return np.array([reply.num_examples for reply in self._replies], dtype=np.float64)

    def get_tensors(self, name: str) -> list[Tensors]:
        """Return every reply's tensors ``NAME/x`` under the name x. For ``model`` and ``delta`` either may have been
        uploaded.
        """
        return [reply.get_tensors(name) for reply in self._replies]

    def models(self) -> list[Tensors]:
        """Return the shared part of each client's model after its local update: w_k by name."""
        return self.get_tensors("model")

    def deltas(self) -> list[Tensors]:
        """Return each client's update: w_k - W by name."""
        return self.get_tensors("delta")

    def weighted_sum(self, group: str, weights: np.ndarray) -> Tensors:
        """Compute ``sum_k weights[k] * tensor_k`` for every tensor of ``group``, in float64.

        Args:
            group: The group. Names are returned without it.
            weights: (m,).

        Raises:
            ValueError: Without replies.
            AbsentError: If clients upload other groups but not this one. ``model`` may be empty.
        """
        self.note_weights(weights)
        return weighted_sum(self._get_sent_tensors(group), weights.tolist())

    def note_weights(self, weights: np.ndarray) -> None:
        """Keep the largest share of one client in a sum."""
        shares = np.abs(weights)
        if shares.sum() > 0:
            self.largest_share = float(np.fmax(self.largest_share, shares.max() / shares.sum()))

    def weighted_terms(self, group: str, weights: np.ndarray) -> tuple[list[Tensors], list[float]]:
        """Return the models and factors of ``weighted_sum``, for a strategy that adds further terms to it."""
        self.note_weights(weights)
        return self._get_sent_tensors(group), weights.tolist()

    def _get_sent_tensors(self, name: str) -> list[Tensors]:
        """Return ``get_tensors(name)``. Raises ``AbsentError``."""
        found = self.get_tensors(name)
        kinds = {sent.partition("/")[0] for reply in self._replies for sent in reply.tensors}
        if kinds and name not in OTHER_PREFIX and not any(found):
            raise AbsentError(
                unknown("group of tensors", name, kinds | {OTHER_PREFIX[kind] for kind in kinds & OTHER_PREFIX.keys()})
            )
        return found

    def class_means(self, weights: Tensor) -> Tensor:
        """Compute the weighted mean of the replies' prototypes by class, or the aggregation that replaces it.

        Args:
            weights: (m, C), 0 if a client does not have a class.

        Returns:
            (C, D) in float64, zeros without a weight above 0.
        """
        means = torch.stack([reply.tensors["proto/mean"] for reply in self._replies]).double()  # (m, C, D)
        if self.aggregation is not None:
            pooled = torch.zeros_like(means[0])
            for c in weights.any(0).nonzero().flatten().tolist():
                held = weights[:, c] > 0
                shares = (weights[held, c] / weights[held, c].sum()).cpu().numpy()
                pooled[c] = self.aggregation.combine([{"mean": row} for row in means[held, c]], shares)["mean"]
            return pooled
        return torch.einsum("mc,mcd->cd", weights, means) / weights.sum(0).clamp_min(1e-300).unsqueeze(1)

    def mean(self, group: str, weights: np.ndarray) -> Tensors:
        """Return the weighted mean of every tensor of ``group``, or the aggregation that replaces it, in float64.

        The weights are normalised here. For models, the aggregated updates are added to the mean of the received models.
        """
        shares = weights / weights.sum()
        if self.aggregation is None or not self._replies:
            return self.weighted_sum(group, shares)
        if group != "model":
            return self.aggregation.combine(self._get_sent_tensors(group), shares)
        if not any(deltas := self.deltas()):
            return {}  # clients send nothing of the model
        change = self.aggregation.combine(deltas, shares)
        begun = weighted_sum([reply.start_model(change) for reply in self], shares.tolist())
        return {name: begun[name] + change[name] for name in change}

    def mean_metrics(self) -> dict[str, float]:
        """Return the example-weighted mean of each metric over the replies that have it."""
        found, examples = {}, self.num_examples
        for name in dict.fromkeys(name for reply in self._replies for name in reply.metrics):
            rows = [row for row, reply in enumerate(self._replies) if name in reply.metrics]
            weights = examples[rows] / examples[rows].sum()
            found[name] = float(sum(w * self._replies[row].metrics[name] for w, row in zip(weights, rows, strict=True)))
        return found


def largest(upload_spec: Mapping[str, tuple[int, ...]]) -> int:
    """Return the largest size of a valid reply with the shapes ``upload_spec``, in bytes: double precision, with metadata."""
    return sum(8 * math.prod(shape) + MAX_NPY_HEADER_BYTES for shape in upload_spec.values()) + MAX_REPLY_OVERHEAD_BYTES


def read_reply(
    client: int,
    message: Message,
    upload_spec: Mapping[str, tuple[int, ...]],
    received: Tensors,
    num_examples: int,
    max_norm: float | None = None,
    loss_names: Collection[str] = (),
    counters: Collection[str] = (),
) -> Reply:
    """Return a reply's content. Shapes are checked before bytes are read.

    Args:
        client: Partition id of the client.
        message: The reply.
        upload_spec: Names and shapes of the client's upload.
        received: The tensors that the client received.
        num_examples: The client's number of examples. Other numbers are rejected, because they change its weight.
        max_norm: The largest joint L2 norm.
        loss_names: Names of losses that the method declares in addition to ``loss``.
        counters: Names of tensors, without their groups, that the norm leaves out. They grow with the rounds.

    Raises:
        ValueError: With the cause of rejection.
    """
    arrays, metrics = message.content.get(codec.ARRAYS), message.content.get(codec.METRICS)
    if not isinstance(arrays, ArrayRecord) or not isinstance(metrics, MetricRecord):
        raise ValueError("malformed content")
    found = dict(arrays.items())
    if found.keys() != upload_spec.keys():
        raise ValueError("wrong tensor names")
    lengths = {name: _check_header(found[name], shape) for name, shape in upload_spec.items()}
    sizes = [length for name, length in lengths.items() if name.partition("/")[2] not in counters]
    count = metrics.get("num-examples")
    if not isinstance(count, int) or count <= 0:
        raise ValueError("no examples")
    if count != num_examples:
        raise ValueError("wrong number of examples")
    try:
        tensors = {name: codec.to_tensor(found[name]) for name in upload_spec}
    except (TypeError, ValueError, OSError) as error:
        raise ValueError("malformed content") from error
    if any(t.shape != upload_spec[name] for name, t in tensors.items()):
        raise ValueError("wrong shape")
    known = [found for found in sizes if found is not None]
    size = math.hypot(*known) if len(known) == len(sizes) else math.inf
    size = size if math.isfinite(size) else norm_of(tensors, counters)
    # The model is kept in float32, so a larger double would end the run instead of rejecting the reply.
    checked = [t for n, t in tensors.items() if t.dtype != torch.float32 or n.partition("/")[2] in counters]  # by no norm
    whole = math.isfinite(size) and all(t.float().isfinite().all() for t in checked)
    if not whole or read_divergence(message):
        raise ValueError(NOT_FINITE)
    if max_norm is not None and size > max_norm:
        raise ValueError("norm too large")
    refuse_undeclared(metrics, {"num-examples", "loss", *loss_names})
    numbers = {n: float(v) for n, v in metrics.items() if n != "num-examples" and isinstance(v, (int, float))}
    refuse_large(numbers)
    others = {n: v for n, v in numbers.items() if math.isfinite(v)}
    return Reply(client, tensors, count, others, received, size)


def refuse_undeclared(names: Iterable[str], declared: Collection[str]) -> None:
    """Raise ``ValueError`` with the first name that is not declared. A client that invents thousands would fill the disk."""
    if (more := next((name for name in names if name not in declared), None)) is not None:
        raise ValueError(f"score '{codec.words(more)[:MAX_SHOWN_CHARACTERS]}' is not declared by the method")


def refuse_large(numbers: Mapping[str, float]) -> None:
    """Raise ``ValueError`` for a finite number that float32 does not hold. Sums of such numbers would not be finite."""
    if (name := next((name for name, value in numbers.items() if MAX_NUMBER < abs(value) < math.inf), None)) is not None:
        raise ValueError(f"a score that cannot be ({name})")


def read_divergence(message: Message) -> str:
    """Return a client's report of where its loss or weights stopped being finite, empty without one."""
    about = message.content.get(codec.CONFIG)
    return codec.words(about.get(codec.DIVERGED, ""))[:MAX_SHOWN_CHARACTERS] if isinstance(about, ConfigRecord) else ""


def _check_header(array: Array, shape: tuple[int, ...]) -> float | None:
    """Return an array's L2 norm, if this run's own processes have computed it.

    Raises:
        ValueError: Unless the array has this shape, a known type, and as many bytes as they require. NumPy would allocate what
            a header claims.
    """
    if isinstance(array, codec.TensorArray):  # a tensor already
        tensor, length = codec.to_tensor(array), array.__dict__["norm"]
        found, known = tuple(tensor.shape), tensor.dtype in (torch.float32, torch.float64)
    else:
        found, known, length = tuple(array.shape), array.dtype in ("float32", "float64"), None
    if found != shape:
        raise ValueError("wrong shape")
    if not known:
        raise ValueError("wrong dtype")
    if not isinstance(array, codec.TensorArray):
        _check_bytes(array)
    return length


def _check_bytes(array: Array) -> None:
    """Raise ``ValueError`` unless an array has as many bytes as its shape and type require."""
    size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    if len(array.data) > size + MAX_NPY_HEADER_BYTES:
        raise ValueError("too large")
    file = BytesIO(array.data[:MAX_NPY_HEADER_BYTES])
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except Exception as error:  # the header is a Python literal, and the sender may have written anything
        raise ValueError("malformed content") from error
    if shape != array.shape or dtype != np.dtype(array.dtype):
        raise ValueError("wrong shape")
    if len(array.data) - file.tell() != size:
        raise ValueError("malformed content")


def norm_of(tensors: Tensors, counters: Collection[str]) -> float:
    """Return the joint L2 norm of tensors GROUP/NAME, without those whose NAME is one of ``counters``."""
    return norm(value for name, value in tensors.items() if name.partition("/")[2] not in counters)


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the joint L2 norm of tensors. It is infinite or NaN only if an element is."""
    tensors, size = list(tensors), 0.0
    # In float32 first, seven times as fast. If squares overflow there, in float64.
    for dtype in (None, torch.float64):
        if all(tensor.device.type == "cpu" for tensor in tensors):
            norms = list(torch._foreach_norm(tensors, 2, dtype)) if tensors else []
        else:  # one kernel for all, which on a CPU takes longer to prepare than small tensors take
            norms = [get_total_norm([tensor.to(dtype or tensor.dtype) for tensor in tensors])]
        size = math.hypot(*torch.stack(norms).tolist()) if norms else 0.0  # all at once, because on a GPU each read waits
        if math.isfinite(size):
            break
    return size
