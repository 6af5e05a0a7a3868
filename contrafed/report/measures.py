"""Find by which accuracy the methods of a setting are compared, and which methods lack it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contrafed.report.beside import Beside
from contrafed.report.groups import Group
from contrafed.report.runs import FinishedRun, Points

# In words, and as a function that returns a run's curve: on the test set, and of clients on their own test parts.
MEASURES: tuple[tuple[str, Callable[[FinishedRun], Points]], ...] = (
    ("test accuracy", lambda run: run.points("global", "test", "accuracy")),
    ("clients' accuracy", FinishedRun.own_points),
)


@dataclass(frozen=True)
class Measures:
    """The accuracy by which each group is compared: in words, and as a function that returns a run's curve."""

    said: str
    points: dict[int, Callable[[FinishedRun], Points]]  # by the id of a group, without groups that lack it
    left_out: dict[str, str]  # {method: the accuracy that it lacks in a setting with others}


def use_measure(found: Sequence[Group], said: str, points: Callable[[FinishedRun], Points]) -> Measures:
    """Compare all groups by one accuracy."""
    return Measures(said, {id(group): points for group in found}, {})


def choose_measures(found: Sequence[Group], baseline: str | None) -> Measures:
    """Choose the accuracy that all groups have, or else for each setting the one that the baseline and most groups have.

    Args:
        found: The groups.
        baseline: The method that others are compared with.
    """
    for said, points in MEASURES:
        if all(points(run) for group in found for run in group.runs):
            return use_measure(found, said, points)
    place = Beside([group for group in found if group.until is None], baseline).setting
    settings: dict[str, list[Group]] = {}
    for group in found:
        settings.setdefault(str(place(group)), []).append(group)
    chosen, left_out, words = dict[int, Callable[[FinishedRun], Points]](), dict[str, str](), dict[str, None]()
    for groups in settings.values():
        having = [[group for group in groups if all(map(points, group.runs))] for _, points in MEASURES]
        best = max(range(len(MEASURES)), key=lambda k: (any(g.method == baseline for g in having[k]), len(having[k])))
        said, points = MEASURES[best]
        chosen |= {id(group): points for group in having[best]}
        if having[best]:
            words[said] = None
            left_out |= {group.method: said for group in groups if group not in having[best]}
    return Measures(" or ".join(words), chosen, left_out)


def describe_left_out(found: Sequence[Group], baseline: str | None) -> str:
    """Return a sentence about methods that are not compared with the others of their setting, empty if all are."""
    without = [f"{method} (no {said})" for method, said in choose_measures(found, baseline).left_out.items()]
    return f"Not compared with the others: {', '.join(without)}. Fix: eval_clients=true for all methods." if without else ""
