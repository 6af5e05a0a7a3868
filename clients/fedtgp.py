"""FedTGP's client: FedProto's, with prototypes that the server trains."""

from contrafed.clients.fedproto import Config, FedProtoClient
from contrafed.core.paper import Paper

__all__ = ["Config", "FedTGPClient"]


class FedTGPClient(FedProtoClient):
    """Minimise cross-entropy + lambda * mean over the batch of |z - P_y|^2 / D, with the server's trained prototypes P.

    Source: Zhang et al. 2024. Evaluated by the nearest prototype, as in the authors' code.
    """

    paper = Paper(
        authors="Zhang, Liu, Hua and Cao",
        title="FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning",
        where="AAAI 2024",
        url="https://arxiv.org/abs/2401.03230",
    )
