"""FedBN's client: normalisation layers stay on the client."""

from contrafed.core.paper import Paper
from contrafed.training.base import PARTS, Client, Config

__all__ = ["Config", "FedBNClient"]


class FedBNClient(Client):
    """Minimise cross-entropy. Normalisation layers, also their statistics, are the client's own. Other layers are averaged.

    Source: Li et al. 2021, Algorithm 1.

    Deviation: other normalisation layers, such as GroupNorm, stay local too.
    """

    family = "personal, parts of the model"
    paper = Paper(
        authors="Li, Jiang, Zhang, Kamp and Dou",
        title="FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
        where="ICLR 2021",
        url="https://arxiv.org/abs/2102.07623",
    )
    shared = (*PARTS, "!norm")
