"""End a run before its last round: at a target, or if the accuracy has not risen for long enough."""

from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]


class Stopping:
    """The keys ``early_stop`` and ``target_accuracy``, applied to a run's accuracy.

    Only the curve of evaluations (round, accuracy) is used, so that a resumed run ends where an uninterrupted one does.
    """

    def __init__(self, patience: int | None, target: float | None, split: str = "test") -> None:
        """Set the limits.

        Args:
            patience: Consecutive evaluations without a new best accuracy.
            target: An accuracy, 0 to 1.
            split: The data of the accuracy, ``test`` or ``validation``.
        """
        self.patience, self.target = patience, target
        self.name = "accuracy" if split == "test" else f"{split} accuracy"
        self.reached: int | None = None  # the first round with at least the target's accuracy
        self.stopped: str | None = None  # the key that ended the run before its last round

    def look(self, curve: Curve) -> None:
        """Record the first round that reaches the target."""
        if self.target is not None and self.reached is None:
            self.reached = next((t for t, accuracy in curve if accuracy >= self.target), None)

    def ends(self, curve: Curve, last_round: int) -> bool:
        """Return whether the run ends with the last point of ``curve``, before ``last_round``."""
        self.look(curve)
        if curve and curve[-1][0] < last_round:
            accuracies = [accuracy for _, accuracy in curve]
            since = len(accuracies) - 1 - accuracies.index(max(accuracies))
            if self.reached is not None:
                self.stopped = "target_accuracy"
            elif self.patience is not None and since >= self.patience:
                self.stopped = "early_stop"
        return self.stopped is not None

    @property
    def line(self) -> str:
        """The reason why the run ended."""
        if self.stopped == "target_accuracy":
            return f"the {self.name} has reached target_accuracy={self.target:g}"
        return f"the {self.name} has not risen for early_stop={self.patience} evaluations"


def warn_of_test_data(key: str) -> str:
    """Return the notice that ``key`` selects on test data, so that their accuracy is too high an estimate."""
    return f"{key} selects on test data, whose accuracy is then too high an estimate. Fix: partition.validation_fraction=0.1"
