"""What the methods with class prototypes declare alike: FedProto, MpFedcon, FedCRL and FedCoSR."""

from clients.base import Shapes
from models.base import SplitModel


def with_prototypes(model: SplitModel, down: Shapes, up: Shapes) -> tuple[Shapes, Shapes]:
    """Return the two lists with a prototype table (C, D) and its validity (down) or counts (up), each (C,)."""
    table, row = (model.num_classes, model.embedding_size), (model.num_classes,)
    return down | {"proto/mean": table, "proto/valid": row}, up | {"proto/mean": table, "proto/count": row}
