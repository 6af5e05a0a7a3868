"""Find by which accuracy methods are compared, and which methods lack it."""

from collections.abc import Callable, Sequence

from contrafed.report.runs import FinishedRun, Points, accuracy_of

# In words, and as a function that returns a run's curve: on the test set, and of clients on their own test parts.
MEASURES: tuple[tuple[str, Callable[[FinishedRun], Points]], ...] = (
    ("test accuracy", lambda run: run.points("global", "test", "accuracy")),
    ("clients' accuracy", FinishedRun.own_points),
)


def is_mixed(runs: Sequence[FinishedRun]) -> bool:
    """Return whether no accuracy is there for all runs, so that each shows what it has (``accuracy_of``)."""
    return not any(all(points(run) for run in runs) for _, points in MEASURES)


def choose_measure(runs: Sequence[FinishedRun], baseline: str | None) -> tuple[str, Callable[[FinishedRun], Points], list[str]]:
    """Return the accuracy by which methods are compared, as ``accuracy_of`` does, and the methods that are left out.

    It is that of all runs, or else the one that the baseline and most methods have.
    """
    if not is_mixed(runs):
        return *accuracy_of(runs), []
    methods = dict.fromkeys(run.method for run in runs)
    lacking = [
        [method for method in methods if not all(points(run) for run in runs if run.method == method)] for _, points in MEASURES
    ]
    best = min(range(len(MEASURES)), key=lambda which: (baseline in lacking[which], len(lacking[which])))
    return *MEASURES[best], lacking[best]


def describe_left_out(runs: Sequence[FinishedRun], baseline: str | None) -> str:
    """Return a sentence about methods that are not compared with the others, empty if all are."""
    said, _, without = choose_measure(runs, baseline)
    if not without:
        return ""
    return f"Not compared with the others, without {said}: {', '.join(without)}. Fix: eval_clients=true for all methods."
