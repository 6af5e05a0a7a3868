"""Summarise a curve of evaluation points."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from contrafed.core.metrics import FUNCTIONS

# Points are (round, value), in the order of rounds. Curves are {(scope, split, metric) of metrics.csv: its points}.
Points = Sequence[tuple[int, float]]
Curves = Mapping[tuple[str, str, str], Points]

Order = Sequence[int] | None  # rounds, the best first

SCOPES = ("global", "personal")

# FedRCL reports the exponential moving average (decay 0.9 a round) after 500 and 1,000 rounds.
EMA_DECAY, EMA_ROUNDS = 0.9, (500, 1000)

# Largest number of clients that are rows of a figure.
MAX_SHOWN_CLIENTS = 200


def shown_clients(num_clients: int) -> np.ndarray:
    """Return which clients are rows of a figure: all, or 200 evenly chosen ones."""
    return np.unique(np.linspace(0, num_clients - 1, min(num_clients, MAX_SHOWN_CLIENTS)).astype(np.int64))


def top_k_mean(values: Sequence[float], k: int = 5) -> float:
    """Return the mean of the ``k`` largest values, or of all if there are fewer (PMFL's reported number). NaN for none."""
    best = sorted(values, reverse=True)[:k]
    return sum(best) / len(best) if best else float("nan")


def ema(points: Sequence[tuple[int, float]], decay: float) -> dict[int, float]:
    """Compute the moving average e_t of points (t, a_t): first a_t, then decay e_{t-1} + (1 - decay) a_t.

    This is FedRCL's reported curve, with a decay of 0.9 a round. Between two points it decays once for every round.
    """
    out: dict[int, float] = {}
    last = None
    for t, value in points:
        kept = 0.0 if last is None else decay ** (t - last)
        out[t] = value if last is None else kept * out[last] + (1 - kept) * value
        last = t
    return out


def split_tuned(points: Points, untuned: Points) -> tuple[Points, Points]:
    """Return personal accuracies as a curve of models before their fine-tuning, and the fine-tuned ones.

    Args:
        points: Those of every evaluation. Methods that fine-tune do it for the last one.
        untuned: Those of the last evaluation before the fine-tuning, empty for other methods.
    """
    return ([*points[:-1], *untuned[-1:]], points[-1:]) if untuned and points else (points, [])


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window`` - 1 values before it. For drawn curves, never for reported numbers."""
    tails = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(tail) / len(tail) for tail in tails]


def summary_of_curves(curves: Curves, first_round: int = 1, select_on: str | None = None) -> dict[str, float]:
    """Return the accuracies of a summary, as fractions. NaN stands for a missing accuracy of the global model.

    Points before ``first_round``, which are the initial model's, are in no number. With validation data the best evaluations
    are those with the highest validation accuracy, unless ``select_on`` is ``test``.
    """
    on_test = select_on == "test"
    order, own_order = (None if on_test else rank_rounds(curves, scope, first_round) for scope in SCOPES)
    summary = _global_summary(curves, first_round, "test", "", order)
    for split, rounds in (("train", order), ("validation", None)):
        if points_of(curves, "global", split, "accuracy", first_round):
            summary |= _global_summary(curves, first_round, split, f"{split}_", rounds)
    if held_out := points_of(curves, "global", "clients", "held_out/accuracy", first_round):
        summary["held_out_accuracy"] = held_out[-1][1]
    # Personal models, and the global model on the clients' test parts.
    summary |= _clients_summary(curves, first_round, "personal", "test", "personal_", own_order)
    summary |= _clients_summary(curves, first_round, "personal", "validation", "personal_validation_", None)
    summary |= _clients_summary(curves, first_round, "global", "clients", "clients_", order)
    return summary | _other_scores(curves, first_round, order, own_order)


def list_accuracies(model_names: Iterable[str] = ()) -> list[str]:
    """Return the keys that ``summary_of_curves`` can have. ``model_names``: other models of the method's clients."""
    others = ("held_out", "attackers", *model_names)
    names = ["accuracy", "accuracy_std", *FUNCTIONS, *(f"{name}/accuracy" for name in others)]
    splits, points = ("test", "train", "validation", "clients"), [(t, 0.0) for t in EMA_ROUNDS]
    return list(summary_of_curves({(scope, split, name): points for scope in SCOPES for split in splits for name in names}))


def _other_scores(curves: Curves, first_round: int, order: Order, own_order: Order) -> dict[str, float]:
    """Return the last and the best value of each score other than accuracy (``contrafed.core.metrics``)."""
    found: dict[str, float] = {}
    for scope, prefix, last, rounds in (("global", "", "final", order), ("personal", "personal_", "mean", own_order)):
        for name in FUNCTIONS:
            if points := points_of(curves, scope, "test", name, first_round):
                found |= {f"{prefix}{name}_{last}": points[-1][1], f"{prefix}{name}_best": _by_rank(points, rounds)[0][1]}
    return found


def rank_rounds(curves: Curves, scope: str, first_round: int = 1, split: str = "validation") -> Order:
    """Return the rounds of a scope's evaluations, the highest accuracy on ``split`` first. None without such evaluations."""
    points = points_of(curves, scope, split, "accuracy", first_round)
    return [t for t, _ in sorted(points, key=lambda point: -point[1])] if points else None


def _by_rank(points: Sequence[tuple[int, float]], order: Order) -> list[tuple[int, float]]:
    """Return points with the best first: by ``order``, or without one by their own values."""
    if order is None:
        return sorted(points, key=lambda point: -point[1])
    found = dict(points)
    return [(t, found[t]) for t in order if t in found] or [(0, float("nan"))]


def points_of(curves: Curves, scope: str, split: str, name: str, first_round: int = 1) -> list[tuple[int, float]]:
    """Return the points (round, value) of a curve from ``first_round`` on."""
    return [(t, value) for t, value in curves.get((scope, split, name), ()) if t >= first_round]


def _global_summary(curves: Curves, first_round: int, split: str, prefix: str, order: Order) -> dict[str, float]:
    curve = points_of(curves, "global", split, "accuracy", first_round)
    ranked = [value for _, value in _by_rank(curve, order)] if curve else []
    averages = ema(curve, EMA_DECAY)
    nothing = float("nan")
    summary = {
        f"{prefix}accuracy_final": curve[-1][1] if curve else nothing,
        f"{prefix}accuracy_best": ranked[0] if ranked else nothing,
        f"{prefix}accuracy_top5_mean": top_k_mean(ranked[:5]),
        f"{prefix}accuracy_ema": averages[curve[-1][0]] if curve else nothing,
    }
    return summary | {f"{prefix}accuracy_ema_{t}": averages[t] for t in EMA_ROUNDS if t in averages}


def _clients_summary(curves: Curves, first_round: int, scope: str, split: str, prefix: str, order: Order) -> dict[str, float]:
    def points(name: str) -> list[tuple[int, float]]:
        return points_of(curves, scope, split, name, first_round)

    summary: dict[str, float] = {}
    best_round, best = 0, float("nan")
    if own := points("accuracy"):
        best_round, best = _by_rank(own, order)[0]
        # MpFedcon reports the mean over the last ten evaluations, FedCRL the best. A mean does not use the fine-tuned accuracy.
        last = [value for _, value in split_tuned(own, points("untuned/accuracy"))[0][-10:]]
        summary |= {f"{prefix}accuracy_mean": own[-1][1], f"{prefix}accuracy_best": best}
        summary[f"{prefix}accuracy_last10_mean"] = sum(last) / len(last)
    for *where, name in list(curves):  # clients' other models, such as MpFedcon's refitted heads
        if where == [scope, split] == ["personal", "test"] and name.endswith("/accuracy") and (other := points(name)):
            summary[f"{prefix}{name.removesuffix('/accuracy')}_accuracy_mean"] = other[-1][1]
    if spread := points("accuracy_std"):
        summary[f"{prefix}accuracy_std"] = spread[-1][1]
        if len(spread) == len(own):
            summary[f"{prefix}accuracy_best_std"] = dict(spread).get(best_round, float("nan"))
    return summary
