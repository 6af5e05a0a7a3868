"""FedPPO's client: train as FedAvg does, and report two accuracies from which the server's agent learns."""

from typing import Any

from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.training.base import Batch, Client, ClientStack, Config, Shapes, Tensors

__all__ = ["Config", "FedPPOClient"]


class FedPPOClient(Client):
    """Minimise cross-entropy on the client's own data, and report the accuracies of the received and the trained model on it.

    Source: Zhang et al. 2023, which PMFL cites, and the code of Zhao et al. 2025.

    Deviation: the released code evaluates every client's model on the server's test set. Here clients evaluate on their own
    training parts. This needs no data on the server and keeps the test set unseen.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Zhang and others",
        title="FedPPO",
        where="2023, as PMFL's tables describe it",
    )
    traffic = ("theta", "theta")

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the model in both directions, and two numbers up."""
        broadcast_spec, upload_spec = super().message_spec(model, config)
        return broadcast_spec, upload_spec | {"report/received_accuracy": (), "report/accuracy": ()}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Evaluate, train, evaluate again, and upload."""
        received = self._accuracy(stack)
        self.train(stack)
        return self.make_upload(stack) | {"report/received_accuracy": received, "report/accuracy": self._accuracy(stack)}

    def _accuracy(self, stack: ClientStack) -> Tensor:
        """Return the accuracy (B,) of ``stack.params`` on each client's training part, in evaluation mode."""

        def sums(params: Tensors, batch: Batch, loss_inputs: Tensors) -> Tensors:
            with self.model.holding(params) as model:
                right = model(batch.x).logits.argmax(1) == batch.y
            return {"right": (right * batch.mask).sum(), "count": batch.mask.sum()}

        found = self.over_examples(stack, sums, stack.params, {})
        return found["right"] / found["count"].clamp_min(1)
