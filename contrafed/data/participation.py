"""Draw participation: the availability of clients, and independently of it the server's selection."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.rounding import round_up
from contrafed.core.schema import OnlyWith, Range


@dataclass(frozen=True)
class Selection:
    """Settings that the ``Config`` of every pattern inherits: the selected clients, lost replies, and late clients."""

    select: int | float | None  # None: every client
    loss_rate: Annotated[float, Range(ge=0, le=1)]
    deadline: Annotated[float, Range(gt=0)] | str | None  # seconds, or qSHARE
    over_select: Annotated[float, Range(ge=1)] | None
    late: Literal["drop", "stale", "partial"]
    staleness_a: Annotated[float, Range(ge=0)]  # a

    def count(self, num_clients: int) -> int | None:
        """Return the number of selected clients: a whole number as it is, or a fraction of ``num_clients``, at least 1.

        Raises:
            UserError: Outside 1..num_clients and (0, 1).
        """
        value = self.select
        if value is None:
            return None
        if isinstance(value, int) and 1 <= value <= num_clients:
            return value
        if isinstance(value, float) and 0 < value < 1:
            return max(1, round(value * num_clients))
        raise UserError(
            f"participation.select: {value} is not allowed. Fix: null, a whole number in 1..{num_clients} (the clients that "
            "may train) or a fraction between 0 and 1"
        )


def read_deadline(deadline: float | str | None) -> tuple[float, float | None]:
    """Return ``participation.deadline`` as seconds, infinity for none, and as the share of the cohort that is waited for.

    Raises:
        UserError: For a text that is no share, such as q0.8.
    """
    if not isinstance(deadline, str):
        return (math.inf if deadline is None else deadline), None
    found = re.fullmatch(r"q(0?\.\d+|1(\.0*)?)", deadline)
    if found is None or not float(found[1]):
        raise UserError(
            f"participation.deadline must be seconds above 0, or q and a share of the cohort such as q0.8, got {deadline!r}. "
            "Fix: participation.deadline=30 or q0.8"
        )
    return math.inf, float(found[1])


class Participation:
    """A participation pattern over K clients. In this base class all clients are always available.

    Rounds are Flower's, from 1. The papers' t is ``server_round - 1``. Every draw is a function of (seed, round), never of the
    method. So methods can be compared on the same availability.
    """

    probabilities: np.ndarray | None = None  # (K,) the p_k, in patterns that have them
    everyone = True  # whether all clients are available in every round
    # Whether each client has its own probability and is available independently of other clients and rounds. Privacy
    # amplification by sampling requires it. Each class states it for itself, because a subclass may draw differently.
    independent_draws: ClassVar[bool] = False

    def __init__(self, config: Any, class_proportions: Callable[[], np.ndarray], num_clients: int, seed: int) -> None:
        """Initialise the pattern.

        Args:
            config: Settings of the pattern.
            class_proportions: Returns (K, C) rows that sum to 1, or to 0 for an empty client. Only some patterns call it.
            num_clients: K.
            seed: The run's seed.
        """
        self.config = config
        self.num_clients = num_clients
        self.seed = seed  # of the rates and the availability
        self.draw_seed = seed  # of the server's selection and lost replies: the run's, if the federation has its own
        self.select: int | None = config.count(num_clients)
        self.asked = self.select  # more than ``select`` with over_select
        if self.select is not None and config.over_select is not None:
            self.asked = min(num_clients, round_up(self.select * config.over_select))
        self.with_data: np.ndarray | None = None  # clients with training examples, if some have none
        self.prepare(class_proportions)

    def select_among(self, sizes: np.ndarray) -> None:
        """Let the server select among the clients that have training examples: those with a size (K,) above 0."""
        if not np.all(sizes):
            self.with_data = np.flatnonzero(sizes)

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw what stays fixed for the whole run."""

    @property
    def has_late_clients(self) -> bool:
        """Whether a client can be late: there is a deadline, or the server selects more clients than it waits for."""
        return self.config.deadline is not None or self.config.over_select is not None

    @property
    def realised_mean(self) -> float | None:
        """The mean of p_k over clients. Under ``scaling: analytic`` a single draw of Z can put it far from E[p]."""
        return None if self.probabilities is None else float(self.probabilities.mean())

    def available(self, server_round: int) -> np.ndarray:
        """Return which clients are available in a round, (K,) bool."""
        return np.ones(self.num_clients, dtype=bool)

    def presence(self) -> np.ndarray | None:
        """Return each client's long-run share of rounds with the client available (K,), or None if it is not known."""
        return np.ones(self.num_clients) if self.everyone else None

    @classmethod
    def is_known(cls) -> bool:
        """Return whether ``presence`` is known."""
        return cls.everyone or cls.presence is not Participation.presence

    def probability(self) -> np.ndarray | None:
        """Return each client's long-run share of rounds with a reply (K,): selected, available and not lost, if never late.

        Returns:
            None if ``presence`` is not known.

        Raises:
            UserError: If ``presence`` has another shape, or values outside 0 to 1.
        """
        presence = self.presence()
        if presence is None:
            return None
        wanted = f"{type(self).__name__}.presence must return ({self.num_clients},) shares of rounds, 0 to 1, or None"
        if not isinstance(presence, np.ndarray) or presence.shape != (self.num_clients,) or presence.dtype.kind not in "iuf":
            got = f"{getattr(presence, 'dtype', type(presence).__name__)} {np.shape(presence)}"
            raise UserError(f"{wanted}, got {got}")
        if not ((presence >= 0) & (presence <= 1)).all():
            raise UserError(f"{wanted}, got {presence.min()} to {presence.max()}")
        selected = 1.0 if self.asked is None else self._num_asked / max(self._num_candidates, 1)
        return presence * selected * (1 - self.config.loss_rate)

    @property
    def _num_candidates(self) -> int:
        """The number of clients among which the server selects."""
        return self.num_clients if self.with_data is None else len(self.with_data)

    @property
    def _num_asked(self) -> int:
        return min(self.asked or 0, self._num_candidates)

    @property
    def num_never_available(self) -> int:
        """The number of clients that are available in no round, as far as it is known."""
        presence = None if self.everyone else self.presence()
        return 0 if presence is None else int((presence == 0).sum())

    def loses(self, server_round: int, client: int) -> bool:
        """Return whether a client's reply of a round is lost on its way back. The lost share is ``loss_rate``.

        The client has trained and keeps its client state. The server treats it as unavailable.
        """
        rate: float = self.config.loss_rate
        return rate > 0 and generator(self.draw_seed, "reply loss", server_round - 1, client).random() < rate

    def participants(self, server_round: int) -> np.ndarray:
        """Return the cohort, as sorted ids: the clients that are selected and available.

        The server draws ``asked`` of all clients with data uniformly without replacement. It does not know which clients are
        available.

        Raises:
            UserError: If ``available`` returns another shape or type.
        """
        chosen = None
        if self.asked is not None:
            rng = generator(self.draw_seed, "selection", server_round - 1)
            # O(select) instead of O(K), for a million clients.
            chosen = np.sort(rng.choice(self._num_candidates, self._num_asked, replace=False, shuffle=False))
            chosen = chosen if self.with_data is None else self.with_data[chosen]
        if self.everyone:
            return np.arange(self.num_clients) if chosen is None else chosen
        here = self.available(server_round)
        if not isinstance(here, np.ndarray) or here.shape != (self.num_clients,) or here.dtype != bool:
            wanted = f"{type(self).__name__}.available must return ({self.num_clients},) bool"
            raise UserError(f"{wanted}, got {getattr(here, 'dtype', type(here).__name__)} {np.shape(here)}")
        return np.flatnonzero(here) if chosen is None else chosen[here[chosen]]


def pattern_class_of(choice: Choice) -> type[Participation]:
    """Return the class of the chosen pattern.

    Raises:
        UserError: If there is none, or if its ``everyone`` contradicts its ``available``.
    """
    found = registry.only_subclass(choice.module, Participation)
    if found.everyone and found.available is not Participation.available:
        raise UserError(f"participation={choice.name}: {found.__name__} has an `available` and must say `everyone = False`")
    if not found.everyone and found.available is Participation.available:
        wanted = "must define `available(self, server_round)`"
        raise UserError(f"participation={choice.name}: {found.__name__} says `everyone = False` and {wanted}")
    return found


def make_participation(
    choice: Choice, class_proportions: Callable[[], np.ndarray], num_clients: int, seed: int, draw_seed: int | None = None
) -> Participation:
    """Return the chosen pattern.

    Args:
        choice: The group ``participation``.
        class_proportions: Returns the class proportions (K, C) of the clients.
        num_clients: K, of the clients that may train.
        seed: Of the rates and the availability.
        draw_seed: Of the server's selection and lost replies. None: ``seed``.

    Raises:
        UserError: For wrong settings or a wrong class.
    """
    pattern = pattern_class_of(choice)(choice.config, class_proportions, num_clients, seed)
    if not hasattr(pattern, "select"):
        wanted = "what is drawn once goes into `prepare`, and an `__init__` of its own calls super's"
        raise UserError(f"participation={choice.name}: {type(pattern).__name__} was not initialised; {wanted}")
    if draw_seed is not None:
        pattern.draw_seed = draw_seed
    return pattern


@dataclass(frozen=True)
class Heterogeneous(Selection):
    """Settings of how the participation probabilities p_k differ (PMFL Equation 12)."""

    beta: Annotated[float, Range(gt=0)] | None
    mean_probability: Annotated[float, Range(gt=0, le=1)]
    floor: Annotated[float, Range(ge=0, le=1), OnlyWith("beta")]
    scaling: Annotated[Literal["analytic", "empirical", "empirical_floor"], OnlyWith("beta")]

    def __post_init__(self) -> None:
        """Raise ``UserError`` if the floor is above E[p], because ``empirical_floor`` then has no solution."""
        if self.beta is not None and self.scaling == "empirical_floor" and self.mean_probability < self.floor:
            raise UserError(
                f"participation.mean_probability={self.mean_probability:g} is below participation.floor={self.floor:g}, "
                "which scaling=empirical_floor cannot reach"
            )


def probabilities(
    config: Heterogeneous, class_proportions: Callable[[], np.ndarray], num_clients: int, seed: int
) -> np.ndarray:
    """Compute p_k = max(floor, min(1, <Z, D_k> / r)), with Z ~ Dir(beta 1_C) drawn once per run.

    Source: PMFL Equation 12. D_k are the client's class proportions. The key ``scaling`` sets r:

    * analytic: r = 1/(E[p] C), so that E[p] holds over Z before the floor.
    * empirical: this run's mean is E[p] before floor and cap.
    * empirical_floor: this run's mean is E[p] after floor and cap.

    Without ``beta`` every p_k is E[p]. Deviation: values are capped at 1, because a probability cannot be above 1.

    Args:
        config: Settings of the pattern.
        class_proportions: Returns D (K, C).
        num_clients: K.
        seed: The run's seed.

    Returns:
        The probabilities (K,).

    Raises:
        UserError: If an empirical mean cannot be reached, because too few clients hold the classes that Z favours.
    """
    mean = config.mean_probability
    if config.beta is None:
        return np.full(num_clients, float(mean))
    classes = class_proportions()
    z = generator(seed, "participation probabilities").dirichlet(np.full(classes.shape[1], config.beta))
    raw = classes @ z

    def clip_probabilities(r: float) -> np.ndarray:
        with np.errstate(over="ignore"):  # r may be as small as the smallest <Z, D_k>, and infinity is capped at 1
            return np.maximum(config.floor, np.minimum(1.0, raw / r))

    if config.scaling == "analytic":
        return clip_probabilities(1 / (mean * classes.shape[1]))
    held = raw[raw > 0]
    reachable = (
        (len(held) + config.floor * (num_clients - len(held))) / num_clients if config.scaling == "empirical_floor" else 1.0
    )
    if not len(held) or mean > reachable:
        raise UserError(
            f"participation.scaling={config.scaling} cannot reach mean_probability={mean:g}: only {len(held)} of {num_clients} "
            "clients hold a class that Z favours; use another seed, a larger beta or scaling=analytic"
        )
    if config.scaling == "empirical":
        return clip_probabilities(raw.mean() / mean)
    # The clipped mean falls as r grows. At the lower end all p_k of clients with raw > 0 are 1, at the upper end the mean is at
    # most E[p].
    low, high = float(held.min()), float(held.max()) / mean
    for _ in range(100):
        middle = low**0.5 * high**0.5  # <Z, D_k> spans hundreds of powers of ten if beta is small
        low, high = (middle, high) if clip_probabilities(middle).mean() > mean else (low, middle)
    return clip_probabilities(high)
