"""Read the clients' evaluation replies, and compute a round's summaries of them."""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message

from contrafed.core import codec
from contrafed.core.metrics import FUNCTIONS
from contrafed.server.replies import refuse_large, refuse_undeclared
from contrafed.server.round_log import Population, Round
from contrafed.training.local_round import VALIDATION

VALUES = ("accuracy", "loss")
# Scores are in 0..1, except these, which are in -1..1.
MIN_SCORES = {"mcc": -1}
# Begin the names of scores of clients that are reported apart.
HELD_OUT, ATTACKERS = "held_out/", "attackers/"


@dataclass
class Score:
    """The scores of one client's models on its own examples."""

    client: int
    num_examples: int
    models: dict[str, dict[str, float]]  # accuracy and loss by model, where "" is the client's
    validation: "Score | None" = None  # on its validation part, if it was asked for


def read_score(
    client: int, message: Message, population: Population, model_names: Collection[str], asked: Mapping[str, Any]
) -> Score:
    """Return a client's scores.

    The client's model has ``accuracy`` and ``loss``, every other one ``NAME/accuracy`` and ``NAME/loss``. Other requested
    metrics (``contrafed.core.metrics``) are named likewise. Those on its validation part begin with ``validation/``.

    Args:
        client: Partition id of the client.
        message: The reply.
        population: What the server knows of the clients, such as the examples of their evaluation.
        model_names: Names of models that the method declares in addition to the client's.
        asked: With ``metrics`` and ``validation``, what the client was asked for.

    Raises:
        ValueError: If a number is missing, not finite or impossible, or if a name is not declared.
    """
    found: dict[str, Any] = dict(message.content.get(codec.METRICS, {}))
    declared = {f"{model}{value}" for model in ("", *(f"{name}/" for name in model_names)) for value in (*VALUES, *FUNCTIONS)}
    checked = {key.removeprefix(VALIDATION): found.pop(key) for key in list(found) if key.startswith(VALIDATION)}
    metrics = {name for name in asked.get("metrics", ()) if name in FUNCTIONS}
    score = _read_part(client, found, population.num_test, declared, metrics)
    if checked or asked.get("validation"):
        score.validation = _read_part(client, checked, population.num_validation, declared, metrics)
    return score


def _read_part(
    client: int, found: dict[str, Any], counts: np.ndarray | None, declared: Collection[str], metrics: Collection[str]
) -> Score:
    """Return a client's scores on one of its parts, which has ``counts[client]`` examples, if known. Raises ``ValueError``.

    A summary has a score only if all clients report it. So a client with examples must report each of ``metrics``.
    """
    refuse_undeclared(found, {"num-examples", *declared})
    names = {""} | {key.rpartition("/")[0] for key in found if key.endswith(tuple(f"/{value}" for value in VALUES))}
    try:
        count = operator.index(found["num-examples"])
        models = {name: {v: float(found[f"{name}/{v}" if name else v]) for v in VALUES} for name in sorted(names)}
        for name, scores in models.items():
            prefix = f"{name}/" if name else ""
            scores |= {
                v: float(found[f"{prefix}{v}"]) for v in FUNCTIONS if (v in metrics and count) or f"{prefix}{v}" in found
            }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("malformed content") from error
    if count < 0:
        raise ValueError("malformed content")
    for scores in models.values():
        refuse_large(scores)
        if (wrong := next((name for name, value in scores.items() if not math.isfinite(value)), None)) is not None:
            raise ValueError(f"a score that is not finite ({wrong})")
    named = [pair for scores in models.values() for pair in scores.items() if pair[0] != "loss"]
    if not all(MIN_SCORES.get(name, 0) <= value <= 1 for name, value in named):
        raise ValueError("a score that cannot be")
    if counts is not None and count != counts[client]:
        raise ValueError("wrong number of examples")
    return Score(client, count, models)


def record_scores(done: Round, scores: Sequence[Score], population: Population) -> None:
    """Write the clients' scores and their summaries into the round.

    Other models that a client evaluates are reported under their names, held-out clients under ``held_out``, and simulated
    attackers under ``attackers``.

    Args:
        done: The round.
        scores: The clients' scores.
        population: What the server knows of the clients.
    """
    scores = sorted(scores, key=lambda score: score.client)
    if tested := [score for score in scores if score.num_examples]:
        for model in sorted({name for score in tested for name in score.models}):
            _record_model(done, tested, model, f"{model}/" if model else "")
        done.client_evaluation = summaries(tested, population)
    if checked := [one for score in scores if (one := score.validation) is not None and one.num_examples]:
        _record_model(done, checked, "", "validation_")
        done.client_validation = summaries(checked, population)


def _record_model(done: Round, scores: Sequence[Score], model: str, prefix: str) -> None:
    """Write each client's scores of one model into the round."""
    found = [score for score in scores if model in score.models]
    ids = np.array([score.client for score in found])
    for name in named_scores(found, model):
        done.client_metrics[f"{prefix}{name}"] = (ids, np.array([score.models[model][name] for score in found]))


def named_scores(scores: Sequence[Score], model: str) -> list[str]:
    """Return accuracy, and the other scores except loss that all of these clients report for ``model``."""
    return [name for name in ("accuracy", *FUNCTIONS) if all(name in score.models[model] for score in scores)]


def by_client(scores: list[Score]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return each score of each model as (clients, values), and sort the scores by client."""
    scores.sort(key=lambda score: score.client)
    found = {}
    for model in sorted({name for score in scores for name in score.models}):
        some = [score for score in scores if model in score.models]
        ids = np.array([score.client for score in some])
        for name in named_scores(some, model):
            found[f"{model}/{name}" if model else name] = (ids, np.array([score.models[model][name] for score in some]))
    return found


def summaries(scores: Sequence[Score], population: Population) -> dict[str, float]:
    """Return ``summarise`` of every model, as ``accuracy``, ``NAME/accuracy``, ..., over the honest clients that train.

    Clients that never train give ``held_out/accuracy``, ... and attackers ``attackers/accuracy``, ...
    """
    groups: dict[str, list[Score]] = {"": [], HELD_OUT: [], ATTACKERS: []}
    for score in scores:
        trains = score.client < population.num_clients - population.num_held_out
        groups[HELD_OUT if not trains else ATTACKERS if score.client in population.attackers else ""].append(score)
    found: dict[str, float] = {}
    for place, some in groups.items():
        for model in sorted({name for score in some for name in score.models}):
            prefix = f"{place}{model}/" if model else place
            found |= {f"{prefix}{name}": value for name, value in summarise(some, model).items()}
    return found


def summarise(scores: Sequence[Score], model: str) -> dict[str, float]:
    """Return the means of accuracy and loss over the clients that evaluated ``model``, and their spread over clients.

    Weighted by examples are ``accuracy`` and ``loss``. The plain mean is ``accuracy_mean``, and the mean of the worst tenth of
    the clients ``accuracy_worst_decile``. Other scores are treated likewise, if every client has them.
    """
    evaluated = [score for score in scores if model in score.models]
    examples = np.array([score.num_examples for score in evaluated])
    columns = {name: np.array([score.models[model][name] for score in evaluated]) for name in named_scores(evaluated, model)}
    found = _spread("accuracy", examples, columns.pop("accuracy"))
    found["loss"] = float(np.average([score.models[model]["loss"] for score in evaluated], weights=examples))
    for name, values in columns.items():
        found |= _spread(name, examples, values)
    return found


def _spread(name: str, examples: np.ndarray, values: np.ndarray) -> dict[str, float]:
    worst = np.sort(values)[: max(1, len(values) // 10)]
    return {
        name: float(np.average(values, weights=examples)),
        f"{name}_mean": float(values.mean()),
        f"{name}_std": float(values.std()),
        f"{name}_worst_decile": float(worst.mean()),
    }
