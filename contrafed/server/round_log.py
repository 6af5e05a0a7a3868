"""What a run's rounds are told by: who the nodes are, and what happened in each round."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ConfigRecord, Message

from contrafed.core import codec
from contrafed.server.replies import NOT_FINITE


@dataclass
class Population:
    """What the server knows of all K nodes; a node's index in these arrays is its partition id."""

    sizes: np.ndarray  # (K,) training examples
    node_ids: np.ndarray  # (K,) Flower's node ids
    num_held_out: int = 0  # the last so many never train; their sizes are 0
    num_test: np.ndarray | None = None  # (K,) examples in the nodes' own test parts, where these are known

    @property
    def num_nodes(self) -> int:
        """K."""
        return len(self.sizes)

    @property
    def num_holders(self) -> int:
        """How many nodes hold any data; a node without never takes part and is not counted by any rule."""
        return int(np.count_nonzero(self.sizes))


@dataclass
class Round:
    """What happened in a round, for the log."""

    server_round: int
    participants: np.ndarray  # partition ids that were asked to train
    metrics: dict[str, float] = field(default_factory=dict)  # means over replies, weighted by examples, and a rule's own
    evaluation: dict[str, float] | None = None  # of the global model, on the server
    rejected: Counter[str] = field(default_factory=Counter)  # cause -> replies
    failures: list[str] = field(default_factory=list)  # what failed nodes said
    notes: list[str] = field(default_factory=list)  # what else there is to say of nodes
    accepted: int = 0  # replies that the strategy aggregated
    lost: int = 0  # replies that participation.loss_rate took
    diverged: list[str] = field(default_factory=list)  # nodes whose loss, weights or reply were not finite, and where
    memory_lost: int = 0  # nodes whose memory could not be read back
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    aggregate_seconds: float = 0.0  # of them: checking the replies and the rule
    node_metrics: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # name -> (nodes, values)
    judging: bool = False  # whether nodes were asked to score models
    node_evaluation: dict[str, float] | None = None  # of nodes' models on their own examples; others as NAME/accuracy, ...

    def hear(self, node: int, message: Message, forgetful: set[int], *, judging: bool) -> None:
        """Keep what a node says of itself beside its reply.

        ``forgetful`` are nodes that said while they were judged that their memory is lost, and will again until they train.
        """
        about = message.content.get(codec.CONFIG)
        if not isinstance(about, ConfigRecord):
            return
        lost = "memory-lost" in about
        if lost and node not in forgetful:
            self.memory_lost += 1
            self.notes.append(f"node {node} begins with an empty memory: {codec.words(about['memory-lost'])}")
        (forgetful.add if lost and judging else forgetful.discard)(node)
        if codec.NOTE in about:
            self.notes.append(codec.words(about[codec.NOTE]))

    def reject(self, node: int, cause: str, diverged: str = "") -> None:
        """Count a reply that does not; ``diverged`` is what the node itself says of a loss or weights that are not finite."""
        self.rejected[cause] += 1
        self.failures.append(f"node {node}: {cause}")
        if cause == NOT_FINITE:
            self.failures[-1] = f"node {node}, round {self.server_round}, {diverged or cause}"
            self.diverged.append(self.failures[-1])
