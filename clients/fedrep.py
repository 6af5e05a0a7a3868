"""FedRep, the node half: head epochs with the body frozen, then body epochs with the head frozen (METHODS section 17)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from clients.base import PARTS, Client, Phase
from clients.fedper import HEADS
from clients.stack import LocalWork, Stack
from contrafed.config import Range


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalWork  # of the body phase; the head phase differs in its length alone
    head_epochs: Annotated[int, Range(ge=0)]  # tau_h
    head: Literal["classifier", "projector_classifier"]


class FedRepClient(Client):
    """Cross-entropy, first on the personal head alone, then on the shared body alone. Source: Collins et al. 2021."""

    @classmethod
    def shared_parts(cls, hyper: Any) -> tuple[str, ...]:
        """Everything but the head travels."""
        return tuple(part for part in PARTS if part not in HEADS[hyper.head])

    def phases(self, stack: Stack) -> Iterator[Phase]:
        """The head phase, then the body phase."""
        head = replace(self.hyper.local, epochs=self.hyper.head_epochs, iterations=None)
        yield Phase(head, HEADS[self.hyper.head], "head batches")
        yield Phase(self.hyper.local, self.parts)

    def work_of(self, examples: int) -> int:
        """Return the steps of both phases."""
        head = replace(self.hyper.local, epochs=self.hyper.head_epochs, iterations=None)
        return head.steps(examples) + super().work_of(examples)
