"""Choose the clients that evaluate models, and on which of their parts."""

from dataclasses import dataclass

import numpy as np

from contrafed.config.run_config import Run
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.engines.client_registry import Members
from contrafed.runs.evaluation import test_examples, validation_examples
from contrafed.server.base import FederatedStrategy


@dataclass(frozen=True)
class ScoredClients:
    """The clients that evaluate models."""

    clients: list[int]  # partition ids
    on_validation: bool  # whether they also evaluate on their validation parts
    notice: str  # a line about models that nothing evaluates, empty if all are evaluated
    lack: str  # what these models lack, with a fix, empty if all are evaluated


def choose_scored_clients(run: Run, strategy: FederatedStrategy, members: Members) -> ScoredClients:
    """Return the clients that evaluate models.

    They also evaluate on their validation parts if their models are personal, or if the server has no validation images.

    Args:
        run: The run.
        strategy: Its strategy.
        members: Its clients.

    Raises:
        UserError: For a key that needs test parts, if no client has any.
    """
    here = len(validation_examples(members.federation, run.num_trained))
    on_validation = bool(members.validation_sizes.any()) and (strategy.personal or not here)
    wanted = strategy.personal or run.held_out_clients > 0 or on_validation
    wanted = wanted if run.eval_clients is None else run.eval_clients
    held = members.test_sizes + (members.validation_sizes if on_validation else 0)
    found, held_out = np.flatnonzero(held).tolist(), members.test_sizes[run.num_trained :]
    alone, partition = not strategy.has_global_model, run.client.partition
    needs = {
        "evaluate_after=local_training": run.evaluate_after == "local_training",
        "eval_clients=true": run.eval_clients is True,
        "early_stop": alone and run.early_stop is not None,
        "target_accuracy": alone and run.target_accuracy is not None,
    }
    without = "no client has test examples of its own"
    fix = _find_fix(partition)
    if run.evaluate_only:
        if alone and not (wanted and found):
            raise _refuse_evaluation(run, fix)
        fix = f"train again with {fix}"
    fix = f"Fix: {fix}"
    if wanted and not found and (need := next((key for key, is_so in needs.items() if is_so), None)) is not None:
        raise UserError(f"{need}: {without}. {fix}")
    if wanted and len(held_out) and not held_out.any():
        raise UserError(f"held_out_clients: none of them has test examples of its own. {fix}")
    if wanted and found:
        return ScoredClients(found, on_validation, "", "")
    notice, lack = "", ""
    if wanted:
        notice, lack = f"{without}, so the clients evaluate nothing. {fix}", f"{without}. {fix}"
    elif not len(test_examples(members.federation, run.num_trained)):
        lack = "the server has no test examples"
        notice = f"{lack}, so the global model is not evaluated"
    return ScoredClients([], False, notice, lack)


def _find_fix(partition: Choice) -> str:
    """Return the setting with which clients have test examples."""
    if hasattr(partition.module, "lazy"):
        return f"another partition than {partition.name}"
    return "partition.test_fraction above 0" if partition.config.test_fraction == 0 else "dataset.merge_splits=true"


def _refuse_evaluation(run: Run, fix: str) -> UserError:
    """Return the error for saved models that nothing evaluates. ``fix``: the setting that the run lacks."""
    if run.eval_clients is False:
        return UserError("evaluate_only: eval_clients=false, and the run has only personal models. Fix: eval_clients=true")
    return UserError(f"evaluate_only: the clients of {run.evaluate_only} have no test examples. Fix: train again with {fix}")
