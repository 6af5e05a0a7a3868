"""FedGH's client: a personal body under the server's head, with class prototypes as the only upload."""

from typing import Any

from contrafed.core.errors import UserError
from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Client, ClientStack, Config, Shapes, Tensors
from contrafed.training.prototypes import with_prototypes

__all__ = ["Config", "FedGHClient"]


class FedGHClient(Client):
    """Minimise cross-entropy over the personal body and the received head, and upload the class means of the trained body.

    Evaluated by the personal body and the received head. The second score, ``trained``, uses the head after local training, as
    the authors report.

    Source: Yi et al. 2023.
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
    model_names = ("trained",)

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the head down, and prototypes with counts up. Raises ``UserError`` for a frozen head."""
        if frozen := [name for name in sorted(model.frozen_names) if name.startswith("classifier.")]:
            raise UserError(f"model.freeze: strategy=fedgh trains {frozen[0]} on the server. Fix: model.freeze without it")
        broadcast_spec, _ = super().message_spec(model, config)
        _, upload_spec = with_prototypes(model, {}, {})
        return broadcast_spec, upload_spec

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the received head as the client's last trained head."""
        return add_prefix("trained", select_prefix(received, "model"))

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train body and head, keep the head, and upload the prototypes."""
        self.train(stack)
        stack.state |= add_prefix("trained", self.shared_of(stack.params))
        return self.prototypes(stack)

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the personal body under the received head, and under the head as last trained."""
        return {"model": stack.params, "trained": stack.params | select_prefix(stack.state, "trained")}
