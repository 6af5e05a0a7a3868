"""What comes back from the nodes of a round: the checks by which a reply counts, and the sums that rules make of replies."""

import math
from collections.abc import Iterable, Mapping, Sequence
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
from contrafed.core.tensors import Tensors, group
from contrafed.core.weighted_sum import combine
from contrafed.server.aggregation import Aggregation

# A .npy header of ours has 128 bytes; anything longer than this is none.
NPY_HEADER = 4096
# Characters of what a node says of itself that are shown.
LONGEST = 200
# Bytes of a reply beside its tensors, at the most: metadata, metrics, and what a failed node says.
AROUND = 2**20

# Metrics of one reply, and characters of a name: a client that invents thousands fills the disk.
MAX_METRICS, MAX_NAME_LENGTH = 64, 64

# The cause by which replies are left out whose node diverged.
NOT_FINITE = "not finite"

# What a node may send instead of the other.
OTHER = {"model": "delta", "delta": "model"}


class AbsentError(ValueError):
    """A rule sums tensors that nodes do not send."""


@dataclass
class Reply:
    """One node's valid reply."""

    node: int
    tensors: Tensors  # by the names that the node half declares, NAME/x
    num_examples: int
    metrics: dict[str, float]
    received: Tensors = field(default_factory=dict)  # what this node worked from, NAME/x
    norm: float = 0.0  # joint L2 norm of the tensors

    def group(self, name: str) -> Tensors:
        """Return the tensors ``NAME/x`` under the name x; ``model`` or ``delta`` also where the node sent the other.

        A delta is the model that the node sent less the one that it received, as the node itself would have computed it.
        """
        found, other = group(self.tensors, name), OTHER.get(name)
        if found or other is None:
            return found
        sent, base = group(self.tensors, other), group(self.received, "model")
        if missing := sent.keys() - base.keys():
            raise ValueError(f"{name}/{min(missing)} is not known: the node sends {other}/{min(missing)} but received no model")
        if name == "delta":
            return {x: tensor - base[x].to(tensor.device) for x, tensor in sent.items()}
        return {x: base[x].to(tensor.device) + tensor for x, tensor in sent.items()}

    def begun(self, like: Tensors) -> Tensors:
        """Return what this node's model was before its work, by the names of ``like`` and where its tensors are."""
        return {name: self.received[f"model/{name}"].to(value.device) for name, value in like.items()}


class Replies(Sequence[Reply]):
    """The valid replies of a round, sorted by partition id so that sums do not depend on who answered first."""

    def __init__(self, replies: Iterable[Reply], aggregation: Aggregation | None = None) -> None:
        """``aggregation`` stands in for means of them, None: the mean itself."""
        self.aggregation = aggregation
        self._replies = sorted(replies, key=lambda reply: reply.node)

    def __len__(self) -> int:
        return len(self._replies)

    def __getitem__(self, index: Any) -> Any:
        return self._replies[index]

    @property
    def nodes(self) -> np.ndarray:
        """Partition ids (m,)."""
        return np.array([reply.node for reply in self._replies], dtype=np.int64)

    @property
    def num_examples(self) -> np.ndarray:
        """Training examples per reply (m,), float64."""
        return np.array([reply.num_examples for reply in self._replies], dtype=np.float64)

    def group(self, name: str) -> list[Tensors]:
        """Return every reply's tensors ``NAME/x`` under the name x; of ``model`` and ``delta`` either, whichever was sent."""
        return [reply.group(name) for reply in self._replies]

    def models(self) -> list[Tensors]:
        """Return what of each node's model travels, after its local work: w_k by name."""
        return self.group("model")

    def deltas(self) -> list[Tensors]:
        """Return each node's change of what it received: w_k - W by name."""
        return self.group("delta")

    def weighted_sum(self, group: str, weights: np.ndarray) -> Tensors:
        """Return ``sum_k weights[k] * tensor_k`` for every tensor of ``group``, accumulated in float64.

        ``weights`` is (m,); names come without their group. Raises ``ValueError`` without replies, and ``AbsentError`` for a
        group that nodes do not send, though they send others; of the model there may be nothing that travels.
        """
        return combine(self._sent(group), weights.tolist())

    def terms(self, group: str, weights: np.ndarray) -> tuple[list[Tensors], list[float]]:
        """Return what a rule that adds more to ``weighted_sum`` takes together with it: models and their factors."""
        return self._sent(group), weights.tolist()

    def _sent(self, name: str) -> list[Tensors]:
        """Return ``group(name)``; raises ``AbsentError``."""
        found = self.group(name)
        kinds = {sent.partition("/")[0] for reply in self._replies for sent in reply.tensors}
        if kinds and name not in OTHER and not any(found):
            raise AbsentError(unknown("group of tensors", name, kinds | {OTHER[kind] for kind in kinds & OTHER.keys()}))
        return found

    def class_means(self, weights: Tensor) -> Tensor:
        """Return the weighted mean of the replies' prototypes by class (C, D), or what stands in for it, float64.

        ``weights`` is (m, C), 0 where a node does not hold a class; zeros where no weight is above 0.
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
        """Return the weighted mean of every tensor of ``group``, or what stands in for it, in float64.

        The weights are normalised here. Of models it is the mean of what nodes received and their combined change.
        """
        shares = weights / weights.sum()
        if self.aggregation is None or not self._replies:
            return self.weighted_sum(group, shares)
        if group != "model":
            return self.aggregation.combine(self._sent(group), shares)
        change = self.aggregation.combine(self.deltas(), shares)
        begun = combine([reply.begun(change) for reply in self], shares.tolist())
        return {name: begun[name] + change[name] for name in change}

    def mean_metrics(self) -> dict[str, float]:
        """Return the means, weighted by examples, of the metrics that every reply has."""
        if not self._replies:
            return {}
        weights = self.num_examples / self.num_examples.sum()
        names = [name for name in self._replies[0].metrics if all(name in reply.metrics for reply in self._replies)]
        return {n: float(sum(w * r.metrics[n] for w, r in zip(weights, self._replies, strict=True))) for n in names}


def largest(up: Mapping[str, tuple[int, ...]]) -> int:
    """Return how many bytes no good reply of the shapes ``up`` exceeds: in double precision, with what is around them."""
    return sum(8 * math.prod(shape) + NPY_HEADER for shape in up.values()) + AROUND


def read_reply(
    node: int,
    message: Message,
    up: Mapping[str, tuple[int, ...]],
    received: Tensors,
    num_examples: int,
    max_norm: float | None = None,
) -> Reply:
    """Return a reply's content, or raise ``ValueError`` with the cause; shapes are checked before bytes are read.

    ``up`` names the tensors that the node half sends and their shapes. Refused is what counts other than the node's
    ``num_examples``, by which it would weigh as it likes, and a joint L2 norm above ``max_norm``.
    """
    arrays, metrics = message.content.get(codec.ARRAYS), message.content.get(codec.METRICS)
    if not isinstance(arrays, ArrayRecord) or not isinstance(metrics, MetricRecord):
        raise ValueError("malformed content")
    if set(arrays) != set(up):
        raise ValueError("wrong tensor names")
    for name, shape in up.items():
        if tuple(arrays[name].shape) != shape:
            raise ValueError("wrong shape")
        if arrays[name].dtype not in ("float32", "float64"):
            raise ValueError("wrong dtype")
        _check_bytes(arrays[name])
    count = metrics.get("num-examples")
    if not isinstance(count, int) or count <= 0:
        raise ValueError("no examples")
    if count != num_examples:
        raise ValueError("wrong number of examples")
    try:
        tensors = {name: codec.to_tensor(arrays[name]) for name in up}
    except (TypeError, ValueError, OSError) as error:
        raise ValueError("malformed content") from error
    if any(tuple(t.shape) != up[name] for name, t in tensors.items()):
        raise ValueError("wrong shape")
    size = norm(tensors.values())
    # The model is kept in float32: a double beyond that would end the run in place of the reply.
    whole = math.isfinite(size) and all(t.dtype == torch.float32 or t.float().isfinite().all() for t in tensors.values())
    if not whole or diverged(message):
        raise ValueError(NOT_FINITE)
    if max_norm is not None and size > max_norm:
        raise ValueError("norm too large")
    if len(metrics) > MAX_METRICS or any(len(name) > MAX_NAME_LENGTH for name in metrics):
        raise ValueError("too many metrics")
    numbers = {n: float(v) for n, v in metrics.items() if n != "num-examples" and isinstance(v, (int, float))}
    others = {n: v for n, v in numbers.items() if math.isfinite(v)}
    return Reply(node, tensors, count, others, received, size)


def diverged(message: Message) -> str:
    """Return what a node says of where its loss or weights stopped being finite, empty where it says nothing."""
    about = message.content.get(codec.CONFIG)
    return codec.words(about.get(codec.DIVERGED, ""))[:LONGEST] if isinstance(about, ConfigRecord) else ""


def _check_bytes(array: Array) -> None:
    """Raise ``ValueError`` unless the bytes of an array are as many as it says: NumPy would allocate what a header claims."""
    if isinstance(array, codec.TensorArray):
        return
    size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    if len(array.data) > size + NPY_HEADER:
        raise ValueError("too large")
    file = BytesIO(array.data[:NPY_HEADER])
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except Exception as error:  # the header is a Python literal that anybody may have written
        raise ValueError("malformed content") from error
    if shape != array.shape or dtype != np.dtype(array.dtype):
        raise ValueError("wrong shape")
    if len(array.data) - file.tell() != size:
        raise ValueError("malformed content")


def norm(tensors: Iterable[Tensor]) -> float:
    """Return the joint L2 norm of tensors; infinite or NaN only if an element is."""
    tensors, size = list(tensors), 0.0
    # In float32 first, seven times as fast; where squares overflow there, in float64.
    for dtype in (None, torch.float64):
        if all(tensor.device.type == "cpu" for tensor in tensors):
            norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
        else:  # a kernel for all; on a CPU it takes longer to get ready than small tensors do
            norms = [get_total_norm([tensor.to(dtype or tensor.dtype) for tensor in tensors])]
        size = math.hypot(*torch.stack(norms).tolist()) if norms else 0.0  # read at once: on a GPU reading is a wait
        if math.isfinite(size):
            break
    return size
