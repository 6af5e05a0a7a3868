"""The ServerApp: one run of a method against whatever Grid it is given; the same object in every engine."""

import copy
import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from safetensors import SafetensorError
from safetensors.torch import load_file

from clients.base import Tensors, keeps_parts, score
from clients.node.files import personal_file, shapes_in
from clients.training.workspace import Workspace, workspace_for
from contrafed import checkpoint
from contrafed.devices import DeviceGrid, Register, Roll
from contrafed.reporting import LOGS, Progress, RunRecorder, versions
from contrafed.settings import Run
from core import codec
from core.combine import cores
from core.errors import UserError
from models.base import SplitModel
from partitions.federation import Federation
from partitions.own import facts_of
from partitions.participation.base import make_participation
from strategies.base import FederatedStrategy, Population, Round, strategy_class_of

# Seconds between two looks at the inbox of Flower's simulation runtime.
POLL = 0.05

# In a run's folder: the global model, and the folder of personal ones.
MODEL_FILE, PERSONAL = "model.safetensors", "personal"

app = ServerApp()


@dataclass
class Hosted:
    """A run of this process, whose engine calls the ServerApp; Flower's does so in a thread."""

    run: Run
    stop: threading.Event = field(default_factory=threading.Event)  # set to end the run as Ctrl-C does
    done: threading.Event = field(default_factory=threading.Event)


hosted: Hosted | None = None


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what this process hosts; ``flwr run`` gives ``run_config["overrides"]``, Hydra overrides in one string, instead."""
    if hosted is None:
        from contrafed.experiment import deployed

        mistakes_in_one_line()
        serve(DeviceGrid(grid, context.run_id), deployed(str(context.run_config["overrides"])))
        return
    if hasattr(grid, "node_ids"):  # our own Grid, in the thread that receives Ctrl-C
        serve(grid, hosted.run)
        return
    try:
        serve(StoppableGrid(grid, hosted.stop), hosted.run)
    except KeyboardInterrupt:
        pass  # the thread that received Ctrl-C raises it
    finally:
        hosted.done.set()


class StoppableGrid:
    """A Grid whose waiting ends with ``KeyboardInterrupt`` when ``stop`` is set: threads receive no Ctrl-C."""

    def __init__(self, grid: Grid, stop: threading.Event) -> None:
        self.grid, self.stop = grid, stop

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are there."""
        self._check()
        return self.grid.get_node_ids()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies, up to ``timeout`` seconds."""
        waiting, replies = set(self.grid.push_messages(messages)), []
        ends = None if timeout is None else time.monotonic() + timeout
        while waiting and (ends is None or time.monotonic() < ends):
            self._check()
            found = list(self.grid.pull_messages(waiting))
            replies += found
            waiting -= {reply.metadata.reply_to_message_id for reply in found}
            if waiting:
                time.sleep(POLL)
        return replies

    def _check(self) -> None:
        if self.stop.is_set():
            raise KeyboardInterrupt


def serve(grid: Grid | StoppableGrid | DeviceGrid, run: Run) -> None:
    """Train for ``num_rounds`` rounds and leave the run's folder complete.

    Ctrl-C (``KeyboardInterrupt``) ends the run after writing all that there is, and is raised again.
    """
    folder, node = run.folder, run.node
    assert folder is not None
    settings = node.to_json()
    workspace = workspace_for(settings)
    saved, personal = run.evaluate_only, keeps_parts(node.strategy)
    folders = personal_folders(grid, run, folder, personal)
    register: Register | None = None
    if hasattr(grid, "node_ids"):  # our own Grid knows its nodes
        partition = workspace.federation.partition
        roll = Roll(Population(partition.sizes, grid.node_ids), workspace.federation, partition.class_counts(), None)
    else:
        if isinstance(grid, DeviceGrid):
            settings = replace(node, images=facts_of(workspace.federation.data)).to_json()
        register = Register(grid, workspace.federation, settings, **folders)
        roll = register.call()
    population, federation = roll.population, roll.federation
    participation = make_participation(run.participation, roll.class_proportions, run.num_nodes, run.seed)
    engine = run.engine.config
    rounds = 0 if saved else run.num_rounds
    strategy = strategy_class_of(run.server)(
        run.server.config,
        client_class=workspace.client_class,
        node_config=workspace.config,
        model=workspace.model,
        population=population,
        participation=participation,
        settings=settings,
        num_rounds=rounds,
        seed=run.seed,
        max_norm=engine.max_norm,
        min_replies=run.min_replies,
        work_of=workspace.client_class(workspace, []).work_of,
    )
    if isinstance(grid, DeviceGrid):
        grid.limit_replies(strategy.largest_reply)
    elif folders["load"]:
        check_saved(workspace, folders["load"])
    initial = initial_model(workspace, str(Path(saved) / MODEL_FILE) if saved else run.init_from)
    resumed = checkpoint.find(run.resume) if run.resume else None
    recorder = open_recorder(folder, run, resumed, 0 if saved else 1)
    recorder.partition(roll.class_counts)
    if resumed is not None:
        initial = go_on(resumed, grid, strategy, recorder, folder)
    keeper = checkpoint.Checkpoints(folder, run.composed, resumed) if run.checkpoint_every else None
    began, status, last = time.perf_counter(), "failed", initial
    title = f"{node.strategy.name} on {node.dataset.name}, {run.participation.name} participation"
    try:
        with Progress(rounds, title) as progress:
            cost = getattr(grid, "memory_cost", lambda: None)
            log = Log(recorder, progress, strategy, cost, every_failure=isinstance(grid, DeviceGrid))

            def on_round(done: Round, arrays: ArrayRecord) -> None:
                nonlocal last
                last = codec.from_record(arrays)
                log.write(done)
                if isinstance(grid, DeviceGrid) and register is not None:
                    for line in register.again():
                        progress.note(line)
                t = done.server_round
                if keeper is not None and run.checkpoint_every and t and t % run.checkpoint_every == 0:
                    keeper.save(t, last, strategy.state, grid.take_changed(), recorder.sizes())  # type: ignore[union-attr]

            wanted = strategy.personal if run.eval_nodes is None else run.eval_nodes
            asked = range(population.num_nodes) if wanted else ()
            scored = ConfigRecord({"nodes": [n for n in asked if roll.has_test(n)], **folders})
            first = 0 if resumed is None else resumed.server_round + 1
            strategy.start(
                grid,  # type: ignore[arg-type]
                codec.to_record(initial),
                num_rounds=rounds,
                timeout=engine.round_timeout,
                evaluate_config=scored,
                evaluate_fn=lambda r, arrays: evaluate(
                    workspace, federation, run, r, codec.from_record(arrays), strategy.whole
                ),
                on_round=on_round,
                first_round=first,
            )
            if first > rounds and folders["save"]:  # a finished run whose personal models are wanted after all
                record = codec.to_record(last)
                grid.send_and_receive(strategy.configure_evaluate(rounds, record, scored, grid))  # type: ignore[arg-type]
            if resumed is None and rounds and not log.participants:
                progress.note("no node took part in any round: look at participation, and at partition.on_small=drop")
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        recorder.save_model(last, {"strategy": node.strategy.name, "seed": str(run.seed)})
        named = {"run_id": grid.run_id} if isinstance(grid, DeviceGrid) else {}
        recorder.finish(status, {**facts(run, workspace), **named, "seconds": time.perf_counter() - began})
        recorder.close()
        if keeper is not None:
            keeper.close()


def personal_folders(grid: Grid | StoppableGrid | DeviceGrid, run: Run, folder: Path, personal: bool) -> dict[str, str]:
    """Return where nodes save and load their personal models, "" for not at all.

    A folder of this machine in simulation; devices have places of their own and are told a run's id. Raises ``UserError``.
    """
    saved = Path(run.evaluate_only) if run.evaluate_only and personal else None
    if not isinstance(grid, DeviceGrid):
        save, load = str(folder.resolve() / PERSONAL), "" if saved is None else str((saved / PERSONAL).resolve())
    else:
        save, load = grid.run_id, "" if saved is None else run_of_devices(saved)
    return {"save": save if run.save_personal else "", "load": load}


def run_of_devices(folder: Path) -> str:
    """Return the id of the run of devices that left ``folder``; raises ``UserError`` where none did."""
    summary = folder / "summary.json"
    run = str(json.loads(summary.read_text(encoding="utf-8")).get("run_id", "")) if summary.exists() else ""
    if not run:
        raise UserError(f"evaluate_only: {folder} is no run of devices, which keep their personal models themselves")
    return run


def mistakes_in_one_line() -> None:
    """Have Flower report a user's mistake without a traceback: the line alone says what to do."""

    def shorten(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], UserError):
            record.msg, record.args, record.exc_info = "%s", (f"error: {record.exc_info[1]}",), None
        return True

    logging.getLogger("flwr").addFilter(shorten)


def open_recorder(folder: Path, run: Run, resumed: checkpoint.Checkpoint | None, first_round: int) -> RunRecorder:
    """Return the run's recorder; a run that goes on elsewhere brings its logs along."""
    if resumed is None:
        return RunRecorder(folder, run.text, first_round)
    source = resumed.path.parent.parent
    if source.resolve() != folder.resolve():
        for name in LOGS:
            shutil.copyfile(source / f"{name}.csv", folder / f"{name}.csv")
    return RunRecorder(folder, run.text, first_round, resumed.logs)


def go_on(
    resumed: checkpoint.Checkpoint,
    grid: Grid | StoppableGrid | DeviceGrid,
    strategy: FederatedStrategy,
    recorder: RunRecorder,
    folder: Path,
) -> Tensors:
    """Put server, nodes and figures back to where a checkpoint left them; returns the global model."""
    model, state = resumed.server()
    strategy.state.update(state)
    elsewhere = resumed.path.parent.parent.resolve() != folder.resolve()
    grid.restore(resumed.memories(), changed=elsewhere)  # type: ignore[union-attr]
    for nodes in recorder.past_participants(resumed.server_round):
        recorder.draw_participants(nodes, strategy.population.num_nodes)
    return model


class Log:
    """Turns each finished round into rows of the run folder and a step of the progress bar."""

    def __init__(
        self,
        recorder: RunRecorder,
        progress: Progress,
        strategy: FederatedStrategy,
        memory_cost: Callable[[], tuple[float, int, int, int] | None],
        every_failure: bool = False,
    ) -> None:
        """``every_failure``: every round says which replies did not count, not only the first such round."""
        self.memory_cost, self.every_failure = memory_cost, every_failure
        self.recorder, self.progress, self.strategy = recorder, progress, strategy
        self.num_nodes = strategy.population.num_nodes
        self.warned = False
        self.participants = 0  # over all rounds

    def write(self, done: Round) -> None:
        """Record one round and flush."""
        put, t = self.recorder.metric, done.server_round
        for name, value in (done.evaluation or {}).items():
            split, metric = name.split("/")
            put(t, "global", split, metric, value)
        for name, value in (done.node_evaluation or {}).items():
            put(t, *(("personal", "test") if self.strategy.personal else ("global", "nodes")), name, value)
        for name, (ids, values) in done.node_metrics.items():
            self.recorder.nodes(t, ids, name, values)
        if t > 0:
            for name, value in done.metrics.items():
                put(t, "global", "fit", name, value)
            self.participants += len(done.participants)
            self.recorder.participants(t, done.participants, self.num_nodes)
            failed = sum(done.rejected[cause] for cause in ("failed", "no answer", "evaluation failed"))
            put(t, "global", "system", "bytes_down", done.bytes_down)
            put(t, "global", "system", "bytes_up", done.bytes_up)
            put(t, "global", "system", "failures", failed)
            put(t, "global", "system", "replies_rejected", done.rejected.total() - failed)
            if done.memory_lost:
                put(t, "global", "system", "memory_lost", done.memory_lost)
            self.recorder.time(t, done.seconds, self.memory_cost())
        self.recorder.flush()
        scores = done.evaluation or {}
        if self.strategy.personal and done.node_evaluation:
            scores = {f"test/{name}": value for name, value in done.node_evaluation.items()}
        self.progress.update(t, len(done.participants), scores.get("test/accuracy"), scores.get("test/loss"))
        for line in done.notes:
            self.progress.note(f"round {t}: {line}")
        if done.failures and (self.every_failure or not self.warned):
            self.warned = True
            self.progress.note(f"round {t}: {len(done.failures)} replies did not count; the first: {done.failures[0]}")


def check_saved(workspace: Workspace, folder: str) -> None:
    """Raise ``UserError`` unless every node that holds a test part has a saved personal model of the right shapes there."""
    partition, wanted = workspace.federation.partition, {n: tuple(v.shape) for n, v in workspace.initial.items()}
    for node in range(workspace.federation.num_nodes):
        if len(partition.test(node)) == 0:
            continue
        try:
            found = shapes_in(folder, node)
        except FileNotFoundError as error:
            raise UserError(
                f"evaluate_only: there is no personal model of node {node} in {folder}; the run needs save_personal=true"
            ) from error
        except SafetensorError as error:
            raise UserError(f"evaluate_only: {personal_file(folder, node)} is no safetensors file ({error})") from error
        if found != wanted:
            raise UserError(f"evaluate_only: {personal_file(folder, node)} does not fit the model of this configuration")


def initial_model(workspace: Workspace, path: str | None) -> Tensors:
    """Return the initial global model: drawn from the seed, or read from a safetensors file of the same shapes."""
    if path is None:
        return {name: value.detach().cpu() for name, value in workspace.initial.items()}
    try:
        loaded = load_file(path)
    except SafetensorError as error:
        raise UserError(f"init_from: {path} is no safetensors file ({error})") from error
    for name, value in workspace.initial.items():
        if name not in loaded or loaded[name].shape != value.shape:
            found = f"shape {tuple(loaded[name].shape)}" if name in loaded else "none"
            raise UserError(f"init_from: {path} does not fit: {name} needs shape {tuple(value.shape)}, found {found}")
    return {name: loaded[name] for name in workspace.initial}


def evaluate(
    workspace: Workspace, federation: Federation, run: Run, server_round: int, model: Tensors, whole: bool
) -> MetricRecord | None:
    """Score the global model on the central test set and, if asked for, on all training examples.

    Where not the ``whole`` model travels there is no global one to score: the result is empty. Without a central test set
    (merged splits) the union of the nodes' test parts stands in. A server without any images scores nothing. None between
    evaluations.
    """
    if server_round % run.eval_every and server_round != run.num_rounds:
        return None
    if not whole:
        return MetricRecord({})
    index = federation.central_test
    if not len(index):
        index = np.concatenate([federation.partition.test(n) for n in range(federation.num_nodes)])
    parts = {"test": index}
    if run.eval_train:
        parts["train"] = np.concatenate([federation.partition.train(n) for n in range(federation.num_nodes)])
    scores: dict[str, int | float | list[int] | list[float]] = {}
    judged = copy.deepcopy(workspace.model)
    judged.load_state_dict(model)
    for split, rows in parts.items():
        if not len(rows):
            continue
        loss, accuracy = evaluate_in_parallel(workspace, judged, rows)
        scores[f"{split}/accuracy"], scores[f"{split}/loss"] = accuracy, loss
    return MetricRecord(scores)


def evaluate_in_parallel(workspace: Workspace, model: SplitModel, index: np.ndarray) -> tuple[float, float]:
    """Return (mean loss, accuracy) over ``index``, in fixed shards so that the result does not depend on the cores.

    ``model`` has its own parameters: threads that share a module would see each other's ``holding``.
    """
    if workspace.device.type != "cpu":
        return score(workspace, model, index)[:2]
    shards = [index[i : i + workspace.evaluation_batch] for i in range(0, len(index), workspace.evaluation_batch)]
    with ThreadPoolExecutor(cores()) as pool:
        results = list(pool.map(lambda rows: score(workspace, model, rows), shards))
    total = max(len(index), 1)
    return sum(loss * n for loss, _, n in results) / total, sum(round(acc * n) for _, acc, n in results) / total


def facts(run: Run, workspace: Workspace) -> dict[str, Any]:
    """Return what identifies a run, for its summary."""
    return {
        "method": run.node.strategy.name,
        "dataset": run.node.dataset.name,
        "partition": run.node.partition.name,
        "participation": run.participation.name,
        "model": run.node.model.name,
        "engine": run.engine.name,
        "seed": run.seed,
        "num_nodes": run.num_nodes,
        "num_rounds": run.num_rounds,
        **({"resumed_from": run.resume} if run.resume else {}),
        **({"evaluate_only": run.evaluate_only} if run.evaluate_only else {}),
        "parameters": sum(value.numel() for value in workspace.initial.values()),
        "device": str(workspace.device),
        "versions": versions(),
    }
