"""Execute a run: what its rounds need, and what is written after each round and at the end."""

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from contrafed.config.method import build_strategy, check_batches, check_strategy
from contrafed.config.run_config import Run
from contrafed.core import codec
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.metrics import beside_accuracy
from contrafed.core.privacy import central, gaussian
from contrafed.core.tensors import Tensors
from contrafed.core.tracker import Tracked
from contrafed.data.fingerprint import fingerprint_run, fingerprint_weights
from contrafed.data.loaded import describe_loaded
from contrafed.engines.attack import wrap_in_attack
from contrafed.engines.client_registry import Members
from contrafed.engines.grid import RunGrid
from contrafed.runs import checkpoint
from contrafed.runs.diagnostics import Logged
from contrafed.runs.evaluation import evaluate, find_divergence, initial_file, initial_model
from contrafed.runs.notices import (
    describe_model,
    describe_partition,
    list_attackers,
    said_of_absent,
    said_of_attackers,
    said_of_delta,
    said_of_norms,
    said_of_replies,
    said_of_run,
    said_of_scale,
    said_of_shift,
    said_of_untrained_classes,
    warn_of_large,
    write_title,
)
from contrafed.runs.output import Progress, RoundLog
from contrafed.runs.packing import put_back
from contrafed.runs.recording import facts, open_recorder
from contrafed.runs.scored_clients import choose_scored_clients
from contrafed.runs.selection import Selection, save_best_personal
from contrafed.runs.trackers import Followed
from contrafed.server import checks
from contrafed.server.accountant import Budget
from contrafed.server.base import FederatedStrategy, Population, Round
from contrafed.server.privacy import count_protected_kinds
from contrafed.server.replies import MAX_REPLY_OVERHEAD_BYTES, norm
from contrafed.training.traffic import BYTES_PER_NUMBER, count_scalars
from contrafed.training.workspace import Workspace, workspace_for

# Names in a checkpoint's state: the norms of recent accepted replies, and what is wrong with the global model.
RECENT_NORMS = "recent upload norms"
DIVERGENCE = "divergence"
SIMULATED_TIME = "simulated time"  # the moment, and late replies

# Called after every round with its number and metrics, named SCOPE/SPLIT/METRIC as the columns of metrics.csv.
OnRound = Callable[[int, dict[str, float]], None]


class Session:
    """One run on one Grid."""

    def __init__(self, grid: RunGrid, run: Run, on_round: OnRound | None = None) -> None:
        """Prepare everything up to the first round. ``on_round`` is as in ``contrafed.run``. Raises ``UserError``."""
        assert run.folder is not None
        self.run, self.folder = run, run.folder
        self.grid = grid = wrap_in_attack(grid, run.attack, run.num_trained, run.seed)
        self.workspace = workspace_for(run.client.to_json())
        images = self.workspace.federation.data.fingerprint
        self.fingerprint = fingerprint_run(images, run.client.partition, run.participation, run.clock)
        self.places = self._choose_personal_paths()
        self.resumed = checkpoint.find(run.resume) if run.resume else None
        if run.resume and self.resumed is None:  # complete when the run was checked
            raise UserError(f"resume: {run.resume} is gone or cannot be read. Fix: start again, from another checkpoint")
        before = {} if self.resumed is None else self.resumed.weights  # the file of init_from may be gone by now
        self.weights = {**before, **fingerprint_weights(run.init_from, run.client.model)}
        keeping = run.checkpoint_every is not None or self.resumed is not None
        grid.begin(keeping, {} if self.resumed is None else self.resumed.grid)
        grid.limit_replies(MAX_REPLY_OVERHEAD_BYTES)  # of the answers to queries
        self.members = grid.members(run.client, self.workspace.federation, self.places)
        check_batches(run, self.workspace.model, self.members.sizes)
        self.rounds = 0 if run.evaluate_only else run.num_rounds
        self.model = initial_model(self.workspace.initial, initial_file(run), self.workspace.model.frozen_tensors())
        self.evaluated = self.model  # the global model as the strategy evaluated it in this round
        # What is wrong with the global model now, empty for nothing.
        self.divergence, self.initial_norm = "", norm(self.model.values())
        self.strategy = make_strategy(run, self.workspace, self.members, self.rounds)
        check_strategy(run, self.strategy, self.model)
        self.norms = self.strategy.norm_limit
        grid.limit_replies(self.strategy.largest_reply)
        self.scored = choose_scored_clients(run, self.strategy, self.members)  # before the folder holds anything
        self.selection = Selection(run, self.strategy, self.members, self.scored)
        self.stopping, self.on_round = self.selection.stopping, on_round
        self.budget = budget_of(run, self.strategy)
        self.logged = Logged(run, self.workspace, self.members.federation, self.strategy)
        # Before the recorder, so that the folder is unchanged if it cannot begin.
        self.tracker = Followed(run.tracker, Tracked(self.folder, run.composed, self.resumed is not None))
        self.recorder = open_recorder(run, self.folder, self.resumed)
        self.recorder.partition(self.members.class_counts)
        self.recorder.note, self.recorder.title = said_of_scale(run, self.workspace), said_of_run(run)
        if self.resumed is not None:
            self._go_on(self.resumed)
        self.checkpoints, self._any_accepted = None, False  # the latter: since the last checkpoint
        if run.checkpoint_every:
            self.checkpoints = checkpoint.Checkpoints(self.folder, run.composed, self.resumed, self.fingerprint, self.weights)
        self.began = time.perf_counter()

    def train(self) -> None:
        """Run all remaining rounds."""
        run, strategy = self.run, self.strategy
        first = 0 if self.resumed is None else self.resumed.server_round + 1
        scored = ConfigRecord({"clients": self.scored.clients, **self.places})
        if metrics := beside_accuracy(run.metrics):
            scored["metrics"] = metrics
        if self.scored.on_validation:
            scored["validation"] = True
        with Progress(self.rounds, write_title(run, self.recorder.note)) as progress:
            for line in self._list_notices():
                progress.note(line)

            def follow(server_round: int, values: dict[str, float]) -> None:
                self.tracker.log(server_round, values, progress.note)
                if self.on_round is not None:
                    self.on_round(server_round, values)

            cost, every, names = self.grid.memory_cost, self.grid.every_failure, self.members.names
            log = RoundLog(self.recorder, progress, strategy, cost, every, follow, names)

            def after(done: Round, arrays: ArrayRecord) -> bool:
                self.model = codec.from_record(arrays)
                self._any_accepted |= done.accepted > 0
                if self.budget is not None and done.server_round:
                    self.budget.pass_round(done.participants)
                if ends := self._ends(done):
                    self._evaluate_finally(done, arrays, scored)
                self._keep_best(done, arrays, scored, ends)
                self._watch_model(done, progress)
                log.write(done)
                for line in self.grid.newcomers():
                    progress.note(line)
                if done.diverged and run.on_divergence == "stop":  # before a checkpoint after it
                    raise RunStopped(f"on_divergence=stop: {done.diverged[0]}", "diverged")
                if ends:
                    progress.note(f"ended after round {done.server_round}: {self.stopping.line}")
                elif not 0 < log.participants == log.failed or self.recorder.has_trained:
                    self._save(done.server_round)
                elif done.server_round == self.rounds or log.shows_bug:
                    # Without a checkpoint, or a repeated sweep would resume after rounds that trained nothing.
                    raise RunStopped(f"every client failed in every round; the first: {log.first_failure}")
                return ends

            strategy.start(
                self.grid,  # type: ignore[arg-type]
                codec.to_record(self.model),
                num_rounds=self.rounds,
                timeout=run.engine.config.round_timeout,
                evaluate_config=scored,
                evaluate_fn=self._evaluate,
                on_round=after,
                first_round=first,
            )
            if first > self.rounds:
                self._look_back(scored, progress)
            if self.resumed is None:
                self._advise(log, progress)

    def _list_notices(self) -> list[str]:
        """Return the lines that a run begins with. A resumed run has printed the others before."""
        run, members = self.run, self.members
        data = self.workspace.federation.data
        lines = [describe_loaded(data) if len(data.y) else "", *data.warnings]
        lines += describe_model(self.workspace)
        lines += [*describe_partition(self.workspace), said_of_norms(self.workspace), said_of_shift(self.workspace)]
        lines += [said_of_attackers(run), said_of_untrained_classes(run, data, members.class_counts)]
        lines += [self.selection.notice, self.scored.notice, said_of_delta(run), warn_of_large(members.sizes, members.own_data)]
        lines += [said_of_absent(self.strategy), said_of_replies(run, self.strategy)]
        follow = [f"to follow it: {self.tracker.line}"] if self.tracker.line else []
        if self.resumed is not None:
            follow.insert(0, f"resumed after round {self.resumed.server_round} of {self.rounds}, from {self.resumed.path}")
        return [line for line in lines if line and self.resumed is None] + follow

    def _watch_model(self, done: Round, progress: Progress) -> None:
        """Report a global model that diverged: its score is not finite, or its norm exploded."""
        before, self.divergence = self.divergence, find_divergence(done, self.model, self.initial_norm)
        if self.divergence:
            done.diverged.append(f"round {done.server_round}: {self.divergence}")
            if not before:
                progress.note(f"round {done.server_round}: the global model diverged: {self.divergence}")

    def _look_back(self, scored: ConfigRecord, progress: Progress) -> None:
        """Finish a run that is resumed after its last round: evaluate its target and its personal models."""
        self.stopping.look(self.selection.curve(self.recorder.accuracies))
        if self.places["save"]:
            self._evaluate_finally(self.strategy.round, codec.to_record(self.model), scored)
            for line in (*self.strategy.round.notes, *self.strategy.round.failures):
                progress.note(line)

    def _advise(self, log: RoundLog, progress: Progress) -> None:
        """Print advice if few clients or none participated."""
        if self.rounds and not log.participants:
            progress.note("no client participated in any round: look at participation, and at partition.on_small=drop")
        elif (log.uncounted or self.strategy.time) and not self.recorder.has_trained:
            progress.note("no reply was accepted in any round: the global model is the initial one")
        elif log.participants < log.rounds:
            mean = log.participants / log.rounds
            progress.note(f"{mean:.1f} clients participated in a round, on average. With participation=full all do")

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Evaluate the global model in rounds that have an evaluation."""
        self.evaluated = checks.eval_model(self.strategy, codec.from_record(arrays))
        whole, federation = self.strategy.has_global_model, self.members.federation
        return evaluate(self.workspace, federation, self.run, server_round, self.evaluated, whole)

    def _ends(self, done: Round) -> bool:
        """Return whether the run ends with this round, before its last. At the end, late replies that are on their way are
        lost.
        """
        ends = self.selection.read(done) is not None and done.server_round > 0
        ends = ends and self.stopping.ends(self.selection.curve(self.recorder.accuracies, done), self.rounds)
        if self.strategy.time is not None and (ends or done.server_round == self.rounds):
            self.strategy.time.lose_busy(done)
        return ends

    def _keep_best(self, done: Round, arrays: ArrayRecord, scored: ConfigRecord, ends: bool) -> None:
        """Write the models of a round whose evaluation is the best so far. A run that only evaluates has no best."""
        if self.run.evaluate_only or not self.selection.note_best(self.recorder.accuracies, done):
            return
        best = self.evaluated | self.workspace.model.frozen_tensors()
        self.selection.save(self.folder, best, self._about_model)
        if self.places["save"]:
            config = ConfigRecord({**scored, **({"final": True} if ends else {})})
            save_best_personal(self.strategy, self.grid, done, arrays, config, self.run.engine.config.round_timeout)

    def _evaluate_finally(self, done: Round, arrays: ArrayRecord, scored: ConfigRecord) -> None:
        """Evaluate clients again in a round that turned out to be the last. Some methods train for the last evaluation."""
        final, timeout = ConfigRecord({**scored, "final": True}), self.run.engine.config.round_timeout
        grid: Any = self.grid
        if asking := list(self.strategy.configure_evaluate(done.server_round, arrays, final, grid)):
            self.strategy.aggregate_evaluate(done.server_round, grid.send_and_receive(asking, timeout=timeout))

    def _ending(self) -> dict[str, Any]:
        """Return the summary's entries about an early end and about the target."""
        stopping, found = self.stopping, self.selection.about()
        if stopping.target is not None:
            reached = stopping.reached
            found |= {"target_accuracy": stopping.target, "rounds_to_target": reached}
            for name in ("bytes_up", "bytes_down"):
                found[f"{name}_to_target"] = None if reached is None else self.recorder.total(name, reached)
            if self.strategy.time is not None:
                found["simulated_time_to_target"] = None if reached is None else self.recorder.simulated_time(reached)
        return found

    def _traffic(self) -> dict[str, int]:
        """Return the bytes that a client receives and uploads in a round, counted and by the method's formula, if any."""
        workspace = self.workspace
        sizes = [sum(map(math.prod, message.values())) for message in (self.strategy.broadcast_spec, self.strategy.upload_spec)]
        found = dict(zip(("bytes_down_per_client", "bytes_up_per_client"), sizes, strict=True))
        by_formula = count_scalars(workspace.client_class, workspace.model, workspace.config)
        if by_formula is not None:
            found |= dict(zip(("bytes_down_by_formula", "bytes_up_by_formula"), by_formula, strict=True))
        return {key: BYTES_PER_NUMBER * scalars for key, scalars in found.items()}

    def finish(self, status: str) -> dict[str, Any]:
        """Write the model, the summary and the figures, close every file, and return the summary."""
        run = self.run
        self.recorder.restore()
        under_way = self.strategy.round
        if self.budget is not None and under_way.server_round > self.budget.rounds:  # its broadcasts are already sent
            self.budget.pass_round(under_way.participants)
        with contextlib.ExitStack() as closing:
            if self.checkpoints is not None:
                self.checkpoints.folder = self.recorder.folder / checkpoint.FOLDER
                closing.callback(self.checkpoints.close)
            closing.callback(self.tracker.close, status)
            closing.callback(self.recorder.close)
            left = self._get_final_model()
            self.logged.finish(self.recorder, left, status)
            self.recorder.save_model(left | self.workspace.model.frozen_tensors(), self._about_model)
            seconds = time.perf_counter() - self.began
            spent = {"privacy": run.privacy.name, **self.budget.about()} if self.budget is not None else {}
            told = {
                **facts(run, self.workspace),
                "data_fingerprint": self.fingerprint,
                **({"weights_fingerprint": self.weights} if self.weights else {}),
                **self._traffic(),
                **spent,
                **self.grid.about(),
                **self._ending(),
            }
            if (mean := self.strategy.participation.realised_mean) is not None:
                told["probability_mean"] = mean
            ended = "diverged" if self.divergence and status == "finished" else status
            return self.recorder.finish(ended, {**told, "seconds": seconds})

    @property
    def _about_model(self) -> dict[str, str]:
        """The texts in the header of a saved model. With a seed, noise and cohort could be drawn again."""
        seed = {"seed": str(self.run.seed)} if self.run.privacy.name == "none" else {}
        return {"strategy": self.run.client.strategy.name, **seed}

    def _get_final_model(self) -> Tensors:
        """Return the global model to save: the one that the strategy evaluates or, if that fails, the clients'."""
        try:
            return checks.eval_model(self.strategy, self.model)
        except Exception:  # this error ended the run and was reported
            return self.model

    def _choose_personal_paths(self) -> dict[str, str]:
        """Return the places of personal models that clients are told: where to save and to load them, "" for not at all."""
        run, load = self.run, ""
        personal = run.evaluate_after == "local_training" or self.workspace.client_class.is_personal(self.workspace.config)
        personal = personal or self.workspace.model.buffers_are == "local"
        if run.evaluate_only and personal:
            load = self.grid.load_place(Path(run.evaluate_only), self.workspace)
        return {"save": self.grid.save_place(self.folder) if run.save_personal else "", "load": load}

    def _go_on(self, resumed: checkpoint.Checkpoint) -> None:
        """Restore server, clients and figures from a checkpoint."""
        found, state = resumed.server()
        self.model = {name: found[name] for name in self.model}  # older files have another order
        self.norms.recent = list(state.pop(RECENT_NORMS, []))
        self.divergence = state.pop(DIVERGENCE, "")
        if self.strategy.time is not None:
            try:
                self.strategy.time.restore(state.pop(SIMULATED_TIME))
            except (KeyError, TypeError) as error:
                raise checkpoint.build_version_error(resumed.path) from error
        self.strategy.planned.is_read |= resumed.reads_num_rounds
        self.selection.restore(state, self.folder, self._about_model, resumed.path)
        put_back(self.strategy.state, state)
        self.strategy.round = Round(resumed.server_round, np.zeros(0, dtype=np.int64))
        elsewhere = resumed.path.parent.parent.resolve() != self.folder.resolve()
        self.grid.restore(resumed.client_states(), changed=elsewhere)
        for clients in self.recorder.past_participants(resumed.server_round):
            self.recorder.draw_participants(clients, self.run.num_clients)
            if self.budget is not None:
                self.budget.pass_round(clients)

    def _save(self, server_round: int) -> None:
        """Write a checkpoint after every ``checkpoint_every`` rounds."""
        every = self.run.checkpoint_every
        if self.checkpoints is not None and every and server_round and server_round % every == 0:
            changed, own = self.grid.take_changed(), self.grid.own(server_round)
            logs, sums = self.recorder.sizes(), self.recorder.checksums()
            state = self.strategy.state | {RECENT_NORMS: list(self.norms.recent), DIVERGENCE: self.divergence}
            state |= self.selection.state()
            if self.strategy.time is not None:
                state[SIMULATED_TIME] = self.strategy.time.state()
            accepted, reads = self._any_accepted, self.strategy.planned.is_read
            self.checkpoints.save(server_round, self.model, state, changed, logs, own, sums, accepted, reads)
            self._any_accepted = False
            self.grid.on_checkpoint(server_round, self.checkpoints.wait)


def make_strategy(run: Run, workspace: Workspace, members: Members, rounds: int) -> FederatedStrategy:
    """Build the strategy of a run with this number of rounds. It sees held-out clients as clients without training data."""
    sizes = np.where(np.arange(run.num_clients) < run.num_trained, members.sizes, 0)
    client, attackers = workspace.client_class(workspace, []), list_attackers(run)
    if not hasattr(client, "client_states"):
        raise UserError(f"{type(client).__name__}.__init__ must call super().__init__ with all that it is given")
    return build_strategy(
        run,
        workspace.model,
        Population(
            sizes,
            members.node_ids,
            run.held_out_clients,
            members.test_sizes,
            members.class_counts,
            members.validation_sizes,
            attackers if len(attackers) < run.num_trained else (),
        ),
        lambda: members.class_proportions()[: run.num_trained],
        settings=members.settings,
        num_rounds=rounds,
        num_local_steps=client.num_local_steps,
    )


def budget_of(run: Run, strategy: FederatedStrategy) -> Budget | None:
    """Return the run's privacy budget before any round, None without one."""
    config = run.privacy.config
    if not isinstance(config, gaussian.Gaussian):
        return None
    probability = None
    if isinstance(config, central.Config) and config.amplification:
        probabilities = strategy.participation.probability()
        assert probabilities is not None  # checked before
        probability = float(probabilities.max())
    kinds = count_protected_kinds(list(strategy.upload_spec), list(strategy.broadcast_spec), run.client.strategy.name)
    return Budget(config, kinds, run.num_clients, probability)
