"""Who shows up: the availability of nodes, and apart from it the server's selection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from contrafed import registry
from contrafed.config import Range, build, convert
from contrafed.errors import UserError
from contrafed.randomness import generator

SHARED_KEYS = registry.COMMON_KEYS | {"select"}


class Participation:
    """A participation pattern over K nodes; this base class is the one in which everyone is always available.

    Rounds are Flower's, from 1; the papers' t is ``server_round - 1``. Every draw is a function of (seed, round), never of
    the method, so that methods can be compared on the same availability.
    """

    probabilities: np.ndarray | None = None  # (K,) the p_k of patterns that have them
    everyone = True  # whether all nodes are available in every round

    def __init__(self, config: Any, class_proportions: Callable[[], np.ndarray], num_nodes: int, seed: int) -> None:
        """``class_proportions()`` returns (K, C) rows that sum to 1; it is called only by patterns that need it."""
        self.config = config
        self.num_nodes = num_nodes
        self.seed = seed
        self.select: int | None = None
        self.prepare(class_proportions)

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw what holds for the whole run."""

    def available(self, server_round: int) -> np.ndarray:
        """Return which nodes are available in a round, (K,) bool."""
        return np.ones(self.num_nodes, dtype=bool)

    def participants(self, server_round: int) -> np.ndarray:
        """Return the nodes that take part, sorted ids: selected by the server and available.

        The server draws ``select`` of all nodes uniformly without replacement, blind to who is available.
        """
        chosen = None
        if self.select is not None:
            rng = generator(self.seed, "selection", server_round - 1)
            # Costs O(select), not O(K): a million nodes are no array here.
            chosen = np.sort(rng.choice(self.num_nodes, self.select, replace=False, shuffle=False))
        if self.everyone:
            return np.arange(self.num_nodes) if chosen is None else chosen
        here = self.available(server_round)
        return np.flatnonzero(here) if chosen is None else chosen[here[chosen]]


def make_participation(
    settings: Mapping[str, Any], class_proportions: Callable[[], np.ndarray], num_nodes: int, seed: int
) -> Participation:
    """Return the pattern of the ``participation`` group. Raises ``UserError``."""
    module, config, select = _configured(settings, num_nodes)
    pattern = registry.only_subclass(module, Participation)(config, class_proportions, num_nodes, seed)
    pattern.select = select
    return pattern


def check_settings(settings: Mapping[str, Any], num_nodes: int) -> None:
    """Raise ``UserError`` for a wrong key, type or value, or a file that is not there."""
    _, config, _ = _configured(settings, num_nodes)
    if hasattr(config, "path"):
        if config.path is None:
            raise UserError(f"participation={settings['name']} needs participation.path")
        if not Path(config.path).expanduser().is_file():
            raise UserError(f"participation.path: there is no file {config.path}")


def _configured(settings: Mapping[str, Any], num_nodes: int) -> tuple[Any, Any, int | None]:
    module = registry.find("partitions.participation", "participation", settings)
    config = build(module.Config, settings, "participation", ignore=SHARED_KEYS)
    return module, config, _selected(settings.get("select"), num_nodes)


def _selected(select: Any, num_nodes: int) -> int | None:
    """Return how many nodes the server selects: a whole number as it is, a fraction of all nodes, None for every node."""
    value = convert(int | float | None, select, "participation.select")
    if value is None:
        return None
    if isinstance(value, int) and 1 <= value <= num_nodes:
        return value
    if isinstance(value, float) and 0 < value < 1:
        return max(1, round(value * num_nodes))
    raise UserError(
        f"participation.select must be null, a whole number in 1..{num_nodes} (num_nodes) or a fraction between 0 and 1, "
        f"got {select}"
    )


@dataclass(frozen=True)
class Heterogeneous:
    """How the participation probabilities p_k differ (PMFL Equation 12, METHODS section 4.6)."""

    beta: Annotated[float, Range(gt=0)] | None
    mean_probability: Annotated[float, Range(gt=0, le=1)]
    floor: Annotated[float, Range(ge=0, le=1)]
    scaling: Literal["analytic", "empirical", "empirical_floor"]


def probabilities(config: Heterogeneous, class_proportions: Callable[[], np.ndarray], num_nodes: int, seed: int) -> np.ndarray:
    """Return p_k = max(floor, min(1, <Z, D_k> / r)) (K,), Z ~ Dir(beta 1_C) once per run, D_k the node's class proportions.

    r by ``scaling``: ``analytic`` 1/(E[p] C), so that E[p] holds over Z before the floor; ``empirical`` so that this run's
    mean is E[p] before floor and cap; ``empirical_floor`` so that it is after them. ``beta`` None: every p_k is E[p].
    Deviation from Equation 12: capped at 1, since a probability above 1 is none.
    """
    if config.beta is None:
        return np.full(num_nodes, float(config.mean_probability))
    classes = class_proportions()
    z = generator(seed, "participation probabilities").dirichlet(np.full(classes.shape[1], config.beta))
    raw = classes @ z

    def clipped(r: float) -> np.ndarray:
        return np.maximum(config.floor, np.minimum(1.0, raw / r))

    mean = config.mean_probability
    if config.scaling == "analytic":
        return clipped(1 / (mean * classes.shape[1]))
    if config.scaling == "empirical":
        return clipped(raw.mean() / mean)
    if mean < config.floor:
        raise UserError(f"participation.mean_probability={mean} is below participation.floor={config.floor}")
    low, high = 1e-12, 1e12  # the clipped mean falls as r grows
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if clipped(middle).mean() > mean else (low, middle)
    return clipped(high)
