"""lognormal: a fixed number of classes per client and log-normal sizes (MpFedcon's FEMNIST)."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    classes_per_client: Annotated[int, Range(ge=1)]
    mean_size: Annotated[float, Range(gt=0)]
    sigma: Annotated[float, Range(ge=0)]


# Clients that get more examples get no further class.
FIXED_CLASSES = True


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return K parts: S random classes each, a log-normal number of examples, in equal shares of the classes.

    If the clients together need more of a class than there is, all get proportionally less of it.

    Source: MpFedcon, FEMNIST.
    """
    classes, each = draw.num_present, config.classes_per_client
    if each > classes:
        raise UserError(f"partition.classes_per_client={each}: the data have {classes} classes. Fix: a smaller number")
    mu = np.log(config.mean_size) - config.sigma**2 / 2  # then the mean, not the median, is mean_size
    sizes = draw.rng.lognormal(mu, config.sigma, draw.num_clients)
    wants = np.zeros((draw.num_clients, classes))
    for row, size in enumerate(sizes):
        wants[row, draw.rng.choice(classes, each, replace=False)] = size / each
    parts: list[list[np.ndarray]] = [[] for _ in range(draw.num_clients)]
    for label, examples in enumerate(draw.by_class()):
        want = wants[:, label]
        total = want.sum()
        ends = np.rint(np.cumsum(want) * min(1.0, len(examples) / total if total else 0.0)).astype(np.int64)
        for client in np.flatnonzero(want).tolist():
            parts[client].append(examples[ends[client - 1] if client else 0 : ends[client]])
    return [np.concatenate(part) for part in parts]
