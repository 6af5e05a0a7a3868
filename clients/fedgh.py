"""FedGH, the node half: a body of its own and the server's head; only class prototypes are sent."""

from typing import Any

from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import group, named
from contrafed.training.base import Client, Config, Shapes, Stack, Tensors
from contrafed.training.prototypes import with_prototypes

__all__ = ["Config", "FedGHClient"]


class FedGHClient(Client):
    """Cross-entropy over own body and received head together; sends the trained body's class means.

    Source: Yi et al. 2023. Judged by its own body and the head as received; ``trained``: by the head as it left training, which
    is what the authors report.
    """

    family = "personal, with prototypes"
    paper = Paper(
        authors="Yi, Wang, Liu, Shi and Yu",
        title="FedGH: Heterogeneous Federated Learning with Generalized Global Header",
        where="ACM Multimedia 2023",
        url="https://arxiv.org/abs/2303.13137",
    )
    traffic = ("pi", "omega")
    shared = ("classifier",)

    @classmethod
    def messages(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """The head down, prototypes with counts up."""
        down, _ = super().messages(model, config)
        _, up = with_prototypes(model, {}, {})
        return down, up

    def fresh_memory(self, received: Tensors) -> Tensors:
        """The head as it last left training here, at first the received one."""
        return named("trained", group(received, "model"))

    def local_work(self, stack: Stack) -> Tensors:
        """Train body and head, remember the head, send the prototypes."""
        self.train(stack)
        stack.memory |= named("trained", {n: v for n, v in stack.params.items() if self.travels(n)})
        return self.prototypes(stack)

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """The own body under the received head, and under the head as trained."""
        return {"model": stack.params, "trained": stack.params | group(stack.memory, "trained")}
