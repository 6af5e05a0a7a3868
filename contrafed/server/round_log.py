"""Record what the server knows of the clients, and what happened in each round."""

import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ConfigRecord, Message

from contrafed.core import codec
from contrafed.server.replies import NOT_FINITE


@dataclass
class Population:
    """What the server knows of all K clients. A client's index in these arrays is its partition id."""

    sizes: np.ndarray  # (K,) training examples
    node_ids: np.ndarray  # (K,) Flower's node ids
    num_held_out: int = 0  # number of last clients that never train, with sizes 0
    num_test: np.ndarray | None = None  # (K,) examples in each client's test part, if known
    class_counts: np.ndarray | None = None  # (K, C) training examples of each class, if known
    num_validation: np.ndarray | None = None  # (K,) examples in each client's validation part, if known
    attackers: tuple[int, ...] = ()  # of a simulated attack: their scores are reported apart

    @property
    def num_held(self) -> np.ndarray:
        """Examples of each client on which models are only evaluated (K,): zeros where the numbers are unknown."""
        return sum((held for held in (self.num_test, self.num_validation) if held is not None), np.zeros_like(self.sizes))

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self.sizes)

    @property
    def num_clients_with_data(self) -> int:
        """The number of clients with data. A client without data never participates, and no strategy counts it."""
        return int(np.count_nonzero(self.sizes))


@dataclass
class Round:
    """The log of a round."""

    server_round: int
    participants: np.ndarray  # partition ids of the cohort
    # means over replies, weighted by examples, and the strategy's metrics
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] | None = None  # of the global model, on the server
    rejected: Counter[str] = field(default_factory=Counter)  # cause -> replies
    failures: list[str] = field(default_factory=list)  # messages of failed clients
    notes: list[str] = field(default_factory=list)  # other messages about clients
    accepted: int = 0  # replies that the strategy aggregated
    largest_share: float = math.nan  # of one client in the weighted sum of the replies, NaN without such a sum
    lost: int = 0  # replies lost by participation.loss_rate
    diverged: list[str] = field(default_factory=list)  # clients whose loss, weights or reply were not finite, and where
    state_lost: int = 0  # clients whose state could not be read
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    aggregate_seconds: float = 0.0  # part of it: checking and aggregating replies
    client_metrics: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # name -> (clients, values)
    simulated: dict[str, float] = field(default_factory=dict)  # with a clock: seconds (float) and counts (int)
    evaluating: bool = False  # whether clients were asked to evaluate models
    # clients' models on their own examples, with others as NAME/accuracy, ...
    client_evaluation: dict[str, float] | None = None
    client_validation: dict[str, float] | None = None  # the same on their validation parts

    def hear(self, client: int, message: Message, forgetful: set[int], *, evaluating: bool) -> None:
        """Record a client's texts that come with its reply.

        ``forgetful`` are clients that reported lost client state in an evaluation. They report it again until they train.
        """
        about = message.content.get(codec.CONFIG)
        if not isinstance(about, ConfigRecord):
            return
        lost = "state-lost" in about
        if lost and client not in forgetful:
            self.state_lost += 1
            self.notes.append(f"client {client} begins with an empty client state: {codec.words(about['state-lost'])}")
        (forgetful.add if lost and evaluating else forgetful.discard)(client)
        if codec.NOTE in about:
            self.notes.append(codec.words(about[codec.NOTE]))

    @property
    def num_failed(self) -> int:
        """How many clients failed or did not answer. Other replies were rejected."""
        return sum(self.rejected[cause] for cause in ("failed", "no answer", "evaluation failed"))

    def reject(self, client: int, cause: str, diverged: str = "") -> None:
        """Count a rejected reply. ``diverged`` is the client's report of a loss or weights that are not finite."""
        self.rejected[cause] += 1
        self.failures.append(f"client {client}: {cause}")
        if cause == NOT_FINITE:
            self.failures[-1] = f"client {client}, round {self.server_round}, {diverged or cause}"
            self.diverged.append(self.failures[-1])
