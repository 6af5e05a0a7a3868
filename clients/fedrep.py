"""FedRep, the node half: head epochs with the body frozen, then body epochs with the head frozen (METHODS section 17)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from clients.base import PARTS, Client, Phase, Tensors
from clients.fedper import HEADS
from clients.training.stack import LocalWork, Stack
from core.config import Range


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalWork  # of the body phase; the head phase differs in its length alone
    head_epochs: Annotated[int, Range(ge=0)]  # tau_h
    head: Literal["classifier", "projector_classifier"]
    eval_head_refresh: bool  # whether every node runs the head phase before the run's last evaluation


class FedRepClient(Client):
    """Cross-entropy, first on the personal head alone, then on the shared body alone. Source: Collins et al. 2021."""

    @classmethod
    def shared_parts(cls, config: Any) -> tuple[str, ...]:
        """Everything but the head travels."""
        return tuple(part for part in PARTS if part not in HEADS[config.head])

    def phases(self, stack: Stack) -> Iterator[Phase]:
        """The head phase, then the body phase."""
        yield self._head_phase("head batches")
        yield Phase(self.config.local, self.parts)

    def _head_phase(self, purpose: str) -> Phase:
        head = replace(self.config.local, epochs=self.config.head_epochs, iterations=None)
        return Phase(head, HEADS[self.config.head], purpose, encode_once=self.config.head_epochs > 1)

    def refresh(self, received: Tensors, memory: Tensors, server_round: int) -> Tensors:
        """Fit the head to the final body: a node that was drawn rarely would be judged by a head that hardly trained."""
        if not self.config.eval_head_refresh or not self.config.head_epochs:
            return memory
        # A purpose of its own: the batches are not those of the last round once more.
        return self.train_alone(received, memory, server_round, self._head_phase("final head batches"))

    def work_of(self, examples: int) -> int:
        """Return the steps of both phases."""
        return self._head_phase("").work.steps(examples) + super().work_of(examples)
