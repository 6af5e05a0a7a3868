"""A client's answer to the query for its partition and its examples."""

from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from contrafed.core import codec
from contrafed.core.errors import UserError

MOST = 2**40  # largest number of examples of a class that a client may report
# Ids from here on stand for partitions whose client is away. Flower's are random of 64 bits, except 0 (none) and 1 (the
# server).
FIRST_ABSENT_ID = 2


@dataclass
class Answer:
    """A client's answer to a query. Raises ``UserError`` for an answer that is impossible in this run."""

    node_id: int
    partition: int
    class_counts: np.ndarray
    num_test: int
    own_data: bool
    classes: list[str] = field(default_factory=list)
    key: str = ""  # SHA-256 of its public key, empty where keys are not bound
    num_validation: int = 0
    fingerprint: str = ""  # of the run's data set as the client has it, empty if it has `data`

    @staticmethod
    def read(node_id: int, content: RecordDict, num_clients: int, num_classes: int, name: str = "") -> "Answer":
        """Return the answer in ``content``, checked. ``name`` is the client's."""
        metrics, about = content.get(codec.METRICS, MetricRecord()), content.get(codec.CONFIG, ConfigRecord())
        claimed = about.get("partition-id") if isinstance(about, ConfigRecord) else None
        who = describe(node_id, claimed if isinstance(claimed, int) else None, name)
        unreadable = UserError(f"{who} gave no answer that can be read; is it of another version?")
        if not isinstance(metrics, MetricRecord) or not isinstance(about, ConfigRecord):
            raise unreadable
        if "refused" in about:
            raise UserError(f"{who} cannot participate: {codec.words(about['refused'])}")
        values: dict[str, Any] = dict(metrics)
        try:
            partition = index(values["partition-id"])  # a number with a fraction is none
            counts = np.array([index(number) for number in values["class-counts"]], dtype=np.int64)
            answer = Answer(node_id, partition, counts, index(values["num-test-examples"]), bool(about["own-data"]))
            answer.classes = [codec.words(name) for name in about["classes"]]  # type: ignore[union-attr]
            answer.num_validation = index(values.get("num-validation-examples", 0))
            answer.fingerprint = codec.words(about.get("fingerprint", ""))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise unreadable from error
        if not 0 <= partition < num_clients:
            raise UserError(f"{who} says partition-id={partition}, which is not in 0..{num_clients - 1}")
        if counts.shape != (num_classes,):
            raise UserError(f"{describe(node_id, partition, name)} has counts of {counts.size} classes, not {num_classes}")
        held = answer.num_test, answer.num_validation
        if min(counts.min(), *held) < 0 or max(counts.max(), *held) > MOST:
            raise UserError(f"{describe(node_id, partition, name)} has counts that are not in 0..{MOST}")
        return answer

    def other_examples(self, before: "Answer") -> bool:
        """Return whether its examples differ from those in an earlier answer of the same partition."""
        return (
            bool((self.class_counts != before.class_counts).any())
            or (self.num_test, self.num_validation) != (before.num_test, before.num_validation)
            or self.other_classes(before)
        )

    def other_classes(self, other: "Answer") -> bool:
        """Return whether both name their classes, and differ. A label would then mean different classes."""
        return bool(self.classes and other.classes and self.classes != other.classes)

    def to_json(self) -> list[Any]:
        """Return what a resumed run must know of a client that has not returned."""
        counts = self.class_counts.tolist()
        return [self.partition, counts, self.num_test, self.own_data, self.classes, self.key, self.num_validation]

    @staticmethod
    def away(stored: list[Any]) -> "Answer":
        """Return the answer that ``to_json`` stored, for a client that is away."""
        partition, counts, *rest = stored  # an older checkpoint has no key
        return Answer(FIRST_ABSENT_ID + partition, partition, np.array(counts, dtype=np.int64), *rest)


def describe(node_id: int, partition: int | None, name: str = "") -> str:
    """Return what a client is called in messages: by its partition and its name, by Flower's id if there is neither."""
    if partition is None and not name:
        return f"client {node_id}"
    called = [f"'{name}'"] if name else []
    return " ".join(["client", *called, *([] if partition is None else [f"of partition {partition}"])])
