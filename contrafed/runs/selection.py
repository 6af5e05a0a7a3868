"""Decide by which accuracy a run ends and which evaluation is its best, and keep the models of that evaluation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from contrafed.config.run_config import Run
from contrafed.core import codec
from contrafed.core.disk import replace
from contrafed.core.errors import UserError
from contrafed.core.tensors import Tensors, write
from contrafed.data.federation import Federation
from contrafed.engines.client_registry import Members
from contrafed.engines.personal_models import restore_best
from contrafed.runs.early_stopping import Curve, Stopping, warn_of_test_data
from contrafed.runs.evaluation import test_examples, validation_examples
from contrafed.runs.scored_clients import ScoredClients
from contrafed.server.base import FederatedStrategy, Round

BEST_FILE = "best.safetensors"  # in a run's folder
ENDINGS = ("early_stop", "target_accuracy")
BEST_ROUND, BEST_MODEL = "best round", "best model"  # of a checkpoint's state

# Returns the points (round, accuracy) of a scope and a split so far.
Curves = Callable[[str, str], list[tuple[int, float]]]
Examples = Callable[[Federation, int], np.ndarray]  # of the server, over so many clients


class Selection:
    """The key ``select_on``, and what follows from it: when a run ends, and which evaluation is its best.

    Clients' personal models are looked at where they are evaluated, else the global model.
    """

    def __init__(self, run: Run, strategy: FederatedStrategy, members: Members, scored: ScoredClients) -> None:
        """Choose the data.

        Args:
            run: The run.
            strategy: Its strategy.
            members: Its clients.
            scored: The clients that evaluate models.

        Raises:
            UserError: If ``select_on`` names validation data that the run does not have, or if nothing is ever evaluated by
                which the run could end.
        """
        self.scope = "personal" if strategy.personal and scored.clients else "global"
        available = {
            "validation": self._count(members.validation_sizes, validation_examples, run, members, scored.on_validation),
            "test": self._count(members.test_sizes, test_examples, run, members, False),
        }
        alone = not strategy.has_global_model and not scored.clients
        if run.select_on == "validation" and (alone or not available["validation"]):
            own = self.scope == "personal" or alone
            lack = f"strategy={run.client.strategy.name} has personal models, and no client has" if own else "the run has no"
            keys = "partition.validation_fraction" + ("" if own else " or dataset.validation_fraction")
            raise UserError(f"select_on=validation: {lack} validation data. Fix: set {keys}")
        self.split = run.select_on or ("validation" if available["validation"] else "test")
        ending = next((key for key in ENDINGS if getattr(run, key) is not None), None)
        if ending and (alone or not available[self.split]):
            reason, fix = f"there are no {self.split} examples", "leave it out"
            if alone:
                reason, fix = "eval_clients=false leaves no model to evaluate", "eval_clients=true"
            raise UserError(f"{ending}: {reason}. Fix: {fix}")
        self.stopping = Stopping(run.early_stop, run.target_accuracy, self.split)
        self.lack = "eval_clients=false" if alone and run.eval_clients is False else scored.lack
        self.notice = warn_of_test_data(ending) if ending and self.split == "test" else ""
        self.best_round: int | None = None
        self.best_model: Tensors | None = None  # what best.safetensors holds, for checkpoints alone
        self.keeps_model = run.checkpoint_every is not None

    def _count(self, sizes: np.ndarray, examples: Examples, run: Run, members: Members, asked: bool) -> int:
        """Return the examples by which a model is looked at: the clients' ``sizes`` (K,), or those of the server."""
        own = int(sizes[: run.num_trained].sum())
        here = len(examples(members.federation, run.num_trained)) if self.scope == "global" else 0
        return own if self.scope == "personal" or (asked and not here) else here

    def read(self, done: Round) -> float | None:
        """Return the accuracy that counts of a round, None without an evaluation."""
        own = (done.client_validation if self.split == "validation" else done.client_evaluation) or {}
        if self.scope == "personal":
            return own.get("accuracy") if done.evaluating else None
        found = (done.evaluation or {}).get(f"{self.split}/accuracy")
        return own.get("accuracy") if found is None and self.split == "validation" else found

    def curve(self, curves: Curves, done: Round | None = None) -> Curve:
        """Return the points (round, accuracy) so far, with that of ``done`` if it is new."""
        accuracy = None if done is None or not done.server_round else self.read(done)
        now = [] if done is None or accuracy is None else [(done.server_round, accuracy)]
        return [*curves(self.scope, self.split), *now]

    def note_best(self, curves: Curves, done: Round) -> bool:
        """Return whether this round has the best evaluation so far. Of equal ones the first is the best."""
        curve = self.curve(curves, done)
        if not curve or curve[-1][0] != done.server_round or any(value >= curve[-1][1] for _, value in curve[:-1]):
            return False
        self.best_round = done.server_round
        return True

    def save(self, folder: Path, model: Tensors, about: dict[str, str]) -> None:
        """Write ``best.safetensors``. The file is replaced as a whole."""
        self.best_model = {n: v.detach().cpu().clone() for n, v in model.items()} if self.keeps_model else None
        if not folder.is_dir():  # removed or renamed, which the run notices when it writes its round
            return
        part = folder / f".{BEST_FILE}.part"
        write(part, model, about | {"round": str(self.best_round), "selected_on": self.split})
        replace(part, folder / BEST_FILE)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, empty without a best evaluation."""
        if self.best_round is None or self.best_model is None:
            return {}
        return {BEST_ROUND: self.best_round, BEST_MODEL: self.best_model}

    def restore(self, state: dict[str, Any], folder: Path, about: dict[str, str], path: Path) -> None:
        """Take what the checkpoint in ``path`` kept out of ``state``, and write the best models as they were then."""
        self.best_round, model = state.pop(BEST_ROUND, None), state.pop(BEST_MODEL, None)
        restore_best(folder, path)
        (folder / BEST_FILE).unlink(missing_ok=True)
        if model is not None:
            self.save(folder, model, about)

    def about(self) -> dict[str, Any]:
        """Return the summary's entries about the selection, about an early end and about the target."""
        found: dict[str, Any] = {"select_on": self.split, "best_round": self.best_round}
        if self.lack:
            found["not_evaluated"] = self.lack
        if self.stopping.stopped is not None:
            found["stopped_by"] = self.stopping.stopped
        return found


def save_best_personal(
    strategy: FederatedStrategy, grid: Any, done: Round, arrays: ArrayRecord, scored: ConfigRecord, timeout: float | None
) -> None:
    """Let every client write its model of this round's evaluation, which is the best so far, next to its personal models.

    Where the clients have just written their final models, they write these again. On a device their state may be gone.

    Args:
        strategy: The strategy.
        grid: The grid.
        done: The round.
        arrays: The global model.
        scored: The settings of the evaluation.
        timeout: Seconds to wait.
    """
    saved = {"load": scored["save"]} if scored.get("final") or done.server_round == strategy.planned.count else {}
    asking = list(strategy.configure_evaluate(done.server_round, arrays, ConfigRecord({**scored, "best": True, **saved}), grid))
    replies = list(grid.send_and_receive(asking, timeout=timeout))
    reasons = sorted(codec.words(reply.error.reason) for reply in replies if reply.has_error())
    if missing := len(asking) - len(replies) + len(reasons):
        reason = f": {reasons[0]}" if reasons else ""
        done.notes.append(f"{missing} clients did not write their model of the best evaluation{reason}")
