"""flwr: any row-wise partitioner of flwr-datasets, on this project's labels."""

import contextlib
import inspect
import io
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    partitioner: Literal[
        "ContinuousPartitioner", "DirichletPartitioner", "DistributionPartitioner", "ExponentialPartitioner",
        "GroupedNaturalIdPartitioner", "IidPartitioner", "InnerDirichletPartitioner", "LinearPartitioner",
        "NaturalIdPartitioner", "PathologicalPartitioner", "ShardPartitioner", "SizePartitioner", "SquarePartitioner",
    ]  # fmt: skip
    arguments: dict | None


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return the partitioner's K parts of the training examples in shuffled order.

    If ``arguments`` lacks them, ``num_partitions``, ``partition_by`` and ``seed`` are set here. They are K, the column
    ``label`` (``owner`` for natural ids) and a number from the run's seed.

    Raises:
        UserError: If the partitioner raises an error, or its number of parts is not K.
    """
    import datasets
    import flwr_datasets.partitioner

    order = draw.rng.permutation(len(draw.y))
    columns: dict[str, np.ndarray] = {"example": order, "label": draw.y[order]}
    if draw.owner is not None:
        columns["owner"] = draw.owner[order]
    made = getattr(flwr_datasets.partitioner, config.partitioner)
    ours: dict[str, Any] = {
        "num_partitions": draw.num_clients,
        "partition_by": "owner" if "NaturalId" in config.partitioner else "label",
        "seed": int(draw.rng.integers(2**31)),
    }
    known = inspect.signature(made).parameters
    arguments = {name: value for name, value in ours.items() if name in known} | (config.arguments or {})
    if "distribution_array" in arguments:
        arguments["distribution_array"] = np.array(arguments["distribution_array"])
    # one warning for each of its attempts, and bars
    with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            partitioner = made(**arguments)
            partitioner.dataset = datasets.Dataset.from_dict(columns)
            count = partitioner.num_partitions
            if count == draw.num_clients:
                return [np.asarray(partitioner.load_partition(k)["example"][:], dtype=np.int64) for k in range(count)]
        except (ValueError, TypeError, KeyError, IndexError) as error:
            said = [str(warning.message).partition(". ")[0] for warning in warned[-1:]]
            what = f"{type(error).__name__}: {' '.join(' '.join([str(error), *said]).split())[:400]}"
            raise UserError(
                f"partition.partitioner={config.partitioner} with partition.arguments={config.arguments}: {what}"
            ) from error
    raise UserError(f"partition.partitioner={config.partitioner}: it makes {count} parts. Fix: num_clients={count}")
