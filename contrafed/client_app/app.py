"""Define the ClientApp: the same object in simulation and on a device. Only it reads and writes a client's files.

Flower calls ``app(message, context)`` for one client. Contrafed's engines call ``run_stack`` with the messages of many clients.
Both end in the same ``Client.update`` and ``Client.evaluate_clients``. The client state is the record ``client_state`` of
``Context.state``.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from contrafed.client_app.files import ClientStateError, Moment, StateDir, best_folder, read_personal, write_personal
from contrafed.client_app.message_checks import (
    DATA_DIR,
    check_modules,
    check_paths,
    check_steps,
    in_simulation,
    moment_of,
    run_name,
)
from contrafed.core import codec
from contrafed.core.client_run import ClientRun
from contrafed.core.errors import UserError, unknown
from contrafed.data.fingerprint import fingerprint_images
from contrafed.training.base import Client, Evaluation, Tensors, Update
from contrafed.training.workspace import Workspace, workspace_for

CLIENT_STATE = "client_state"

# Keys that an operator may write into --node-config. num-partitions is Flower's own and not used.
NODE_CONFIG = ("partition-id", "num-partitions", "state-dir", "data", "data-dir", "modules", "max-local-steps")

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client through its ``NumPyClient`` interface."""
    began, opened = time.monotonic(), _open(message, context)
    _check_steps(opened, context)
    if opened.state is not None:
        opened.state.remove_stale()
    arrays, count, metrics = opened.client.fit(codec.to_list(opened.client.names("down"), opened.received), opened.config)
    up = codec.from_list(opened.client.names("up"), arrays)
    memory = opened.client.client_states[0]
    if opened.state is None:
        _commit(context, memory)
    elif memory:
        opened.state.write(memory, opened.now)
    report = opened.report | ({"has-state": True} if memory else {})
    _log_round(opened, f"trained on {count} examples", began, metrics)
    return _reply(message, up, count, metrics, _build_report(opened.client.diverged, report))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate one client's model on its own part of the data.

    Client state stays unchanged, and the run's last evaluation deletes it.
    """
    began, opened = time.monotonic(), _open(message, context)
    config = opened.config | _resolve_personal_paths(opened.config, context, opened.state)
    if config.get("after-training"):
        _check_steps(opened, context)
    if opened.report:  # its client state is lost, so this is not its model
        config.pop("save", None)
    (evaluated,) = _evaluate(opened.client, [opened.received], config, None)
    _log_round(opened, f"evaluated on {evaluated.num_examples} examples", began, evaluated.metrics)
    # A run with checkpoints may be resumed from its last one.
    if opened.state is not None and config.get("final") and opened.now.checkpoint is None:
        opened.state.remove()
    return _scores(message, evaluated, opened.report)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Report this client's partition and its examples per class to the server, or why it cannot participate."""
    config = codec.config_of(message)
    try:
        if not in_simulation():  # before any of them is imported
            check_modules(str(config["settings"]), str(context.node_config.get("modules", "")))
        client, clients = _partition_id(context), ClientRun.from_json(str(config["settings"])).num_clients
        if not 0 <= client < clients:
            raise UserError(
                f"partition-id={client} of --node-config is not in 0..{clients - 1}: this run has num_clients={clients}"
            )
        workspace = _workspace(config, context)
        run, now = moment_of(config, str(context.run_id))
        state = _state(context, workspace, run)
        if state is not None:
            state.open()
            _check_data(state, now, workspace, context)
        elif now.checkpoint is not None and workspace.client_class.has_client_state(workspace.model, workspace.config):
            raise UserError("checkpoint_every and resume: --node-config needs state-dir, for this client's state")
        _resolve_personal_paths(config, context, state)
    except (UserError, OSError) as error:
        refused: dict[str, Any] = {"refused": " ".join(str(error).split())}
        if isinstance(claimed := context.node_config.get("partition-id"), int):
            refused["partition-id"] = claimed
        return Message(RecordDict({codec.CONFIG: ConfigRecord(refused)}), reply_to=message)
    partition, data, has_own = workspace.federation.partition, workspace.federation.data, own_data(context) is not None
    answer = MetricRecord(
        {
            "partition-id": client,
            "num-examples": len(partition.train(client)),
            "num-test-examples": len(partition.test(client)),
            "num-validation-examples": len(partition.validation(client)),
            "class-counts": partition.class_counts()[client].tolist(),
        }
    )
    classes, fingerprint = (list(data.loaded.class_names), "") if has_own else ([], data.fingerprint)
    about = ConfigRecord({"own-data": has_own, "classes": classes, "fingerprint": fingerprint})
    return Message(RecordDict({codec.METRICS: answer, codec.CONFIG: about}), reply_to=message)


def run_stack(
    messages: Sequence[Message], clients: Sequence[int], client_states: Sequence[Tensors], deadline: float | None = None
) -> tuple[list[Message], list[Tensors]]:
    """Train or evaluate clients as one stack.

    Args:
        messages: A message to each client, all of one kind and of one round of one run.
        clients: Partition ids.
        client_states: Each client's state, empty before its first round. It stays unchanged.
        deadline: A moment of ``time.monotonic()``.

    Returns:
        The replies, and each client's new state, in the order of the messages.
    """
    config = codec.config_of(messages[0])
    workspace = workspace_for(str(config["settings"]))
    client = workspace.client_class(workspace, clients, client_states)
    received = _decode_received(messages)
    if messages[0].metadata.message_type == MessageType.EVALUATE:
        evaluated = _evaluate(client, received, config, deadline)
        return [_scores(message, found) for message, found in zip(messages, evaluated, strict=True)], list(client_states)
    client.max_steps = [message.content[codec.CONFIG].get("max-steps") for message in messages]
    updates: list[Update] = client.update(received, int(config["server-round"]), deadline)
    replies = [
        _reply(message, update.tensors, update.num_examples, update.metrics, _build_report(update.diverged), update.norms)
        for message, update in zip(messages, updates, strict=True)
    ]
    pairs = zip(updates, client_states, strict=True)
    return replies, [before if update.diverged else update.client_state for update, before in pairs]


def _evaluate(client: Client, received: list[Tensors], config: Mapping[str, Any], deadline: float | None) -> list[Evaluation]:
    """Evaluate clients' models, or those in the folder ``load``. Write them to ``save``, with ``best`` next to it."""
    models = None
    if config.get("load"):
        found = [read_personal(str(config["load"]), k) for k in client.clients]
        models, received = [model for model, _ in found], [rest for _, rest in found]
    split, final = str(config.get("split", "test")), bool(config.get("final"))
    server_round = int(config["server-round"])
    after_training = bool(config.get("after-training"))
    how: dict[str, Any] = {
        "split": split,
        "final": final,
        "after_training": after_training,
        "metrics": list(config.get("metrics", ())),
        "validation": bool(config.get("validation")),
    }
    evaluated = client.evaluate_clients(received, server_round, deadline=deadline, models=models, **how)
    if config.get("save"):
        place = best_folder(str(config["save"])) if config.get("best") else str(config["save"])
        for k, one, tensors in zip(client.clients, evaluated, received, strict=True):
            write_personal(place, k, one.model, tensors | one.added)
    return evaluated


def _decode_received(messages: Sequence[Message]) -> list[Tensors]:
    """Decode each distinct array record once, so that a broadcast stays one set of tensors."""
    decoded: dict[int, Tensors] = {}
    out = []
    for message in messages:
        record = message.content[codec.ARRAYS]
        key = id(record)
        if key not in decoded:
            decoded[key] = codec.state_of(message.content, codec.ARRAYS)
        out.append(decoded[key])
    return out


def _partition_id(context: Context) -> int:
    """Return the partition id of a client. Raises ``UserError`` for an unknown key in --node-config."""
    for key in context.node_config:
        if key not in NODE_CONFIG:
            raise unknown("--node-config key", key, NODE_CONFIG)
    client = context.node_config.get("partition-id")
    if not isinstance(client, int) or isinstance(client, bool):
        raise UserError(f"--node-config needs partition-id, a whole number from 0 without quotes, found {client!r}")
    return client


def own_data(context: Context) -> tuple[int, str] | None:
    """Return partition id and path of the client's own data, None if the run partitions the data."""
    path = context.node_config.get("data")
    return None if path is None else (_partition_id(context), str(path))


def _workspace(config: Mapping[str, Any], context: Context) -> Workspace:
    """Return the workspace of the server's settings. Raises ``UserError`` if they name files outside the client's data
    folder.
    """
    settings, own = str(config["settings"]), own_data(context)
    if in_simulation():
        torch.set_num_threads(1)  # as in every engine: Ray gives a worker of several CPUs as many threads
    else:
        check_modules(settings, str(context.node_config.get("modules", "")))
        check_paths(settings, str(context.node_config.get("data-dir", DATA_DIR)), own_data=own is not None)
    return workspace_for(settings, own)


def _state(context: Context, workspace: Workspace, run: str) -> StateDir | None:
    """Return the client's files of a run, None in simulation and on a device without state-dir. Raises ``UserError``."""
    place = context.node_config.get("state-dir")
    if place is None:
        return None
    folder = Path(str(place)).expanduser()
    if not folder.is_absolute():  # Flower chooses the working folder of a message's process
        raise UserError(f"--node-config state-dir must be an absolute path, got {place}")
    return StateDir(folder, run, _partition_id(context), workspace.run.strategy.name)


def _check_data(state: StateDir, now: Moment, workspace: Workspace, context: Context) -> None:
    """Raise ``UserError`` if a client's own data changed since a run with checkpoints began."""
    if now.checkpoint is not None and own_data(context) is not None:
        state.check_data(fingerprint_images(workspace.federation.data))


def _resolve_personal_paths(config: Mapping[str, Any], context: Context, state: StateDir | None) -> dict[str, str]:
    """Return the folders of ``save`` and ``load`` on this client: below its own state-dir, never where a server says.

    A server of devices sends a run's id. Paths come only from the engines, whose clients are on this machine.

    Raises:
        UserError: On a device without state-dir.
    """
    wanted = {key: config[key] for key in ("save", "load") if config.get(key)}
    if state is not None:
        runs = {"save": str(context.run_id), "load": wanted.get("load", "")}
        return {key: str(state.personal(run_name(runs[key]))) for key in wanted}
    if wanted and not in_simulation():
        raise UserError("--node-config needs state-dir, where this client keeps its personal model")
    return {key: str(value) for key, value in wanted.items()}


@dataclass(frozen=True)
class Opened:
    """An opened message to one client."""

    client: Client
    received: Tensors
    config: dict[str, Any]
    state: StateDir | None
    now: Moment
    report: dict[str, str | bool]  # part of the reply: what the server should know of the client state


def _open(message: Message, context: Context) -> Opened:
    config, partition = codec.config_of(message), _partition_id(context)
    if config.get("partition", partition) != partition:  # restarted with another one under the same id
        raise UserError(f"--node-config says partition-id={partition}, but this run knows the client as {config['partition']}")
    workspace = _workspace(config, context)
    run, now = moment_of(config, str(context.run_id))
    received, state = codec.state_of(message.content, codec.ARRAYS), _state(context, workspace, run)
    if state is not None:
        _check_data(state, now, workspace, context)
    client = workspace.client_class(workspace, [partition], [codec.state_of(context.state, CLIENT_STATE)])
    report: dict[str, str | bool] = {}
    try:
        if config.get("load"):  # saved models are evaluated without it
            pass
        elif state is not None:
            client.client_states = [state.read(now)]
            _check(client, received)
        elif now.known and not client.client_states[0]:
            raise ClientStateError(f"its state of round {now.known} ended with its process, because it has no state-dir")
    except ClientStateError as error:
        client.client_states = [{}]
        logging.getLogger("flwr").error("this client's state is lost and starts again: %s", error)
        report = {"state-lost": str(error)}
    return Opened(client, received, config, state, now, report)


def _check_steps(opened: Opened, context: Context) -> None:
    """Raise ``UserError`` for a local update of more steps than this device allows."""
    count = len(opened.client.workspace.federation.partition.train(_partition_id(context)))
    check_steps(opened.client.num_local_steps(count), context.node_config.get("max-local-steps"))


def _log_round(opened: Opened, done: str, began: float, metrics: Mapping[str, Any]) -> None:
    """Write a device's line about a round."""
    if in_simulation():
        return
    known = [f"{name} {metrics[name]:.4f}" for name in ("loss", "accuracy") if name in metrics]
    line = ", ".join([done, *known, f"{time.monotonic() - began:.1f} s"])
    run, server_round, (partition,) = opened.now.sitting, int(opened.config["server-round"]), opened.client.clients
    logging.getLogger("flwr").info("partition %d, run %s, round %d: %s", partition, run, server_round, line)


def _check(client: Client, received: Tensors) -> None:
    """Raise ``ClientStateError`` if the client state does not have the names and shapes of the method."""
    (memory,), initial = client.client_states, client.workspace.initial
    if not memory:
        return
    expected = {f"personal/{n}": v for n, v in initial.items() if not client.is_shared(n)}
    expected |= client.init_client_state(received)
    if missing := expected.keys() - memory.keys():
        raise ClientStateError(f"{min(missing)} is missing")
    for name, value in memory.items():
        # Entries that do not exist from the start, such as a momentum or its count of steps, belong to a parameter.
        like = expected.get(name, initial.get(name.rpartition("/")[2], value))
        if value.shape != like.shape and (name in expected or value.dim()):
            raise ClientStateError(f"{name} has shape {tuple(value.shape)}, not {tuple(like.shape)}")


def _build_report(diverged: str, report: Mapping[str, str | bool] | None = None) -> dict[str, str | bool]:
    """Return a reply's report, with the place of a divergence."""
    return {**(report or {}), **({codec.DIVERGED: diverged} if diverged else {})}


def _commit(context: Context, memory: Tensors) -> None:
    if memory:
        context.state[CLIENT_STATE] = codec.to_record(memory)


def _scores(message: Message, evaluated: Evaluation, report: Mapping[str, str | bool] | None = None) -> Message:
    metrics = MetricRecord({"num-examples": evaluated.num_examples, **evaluated.metrics, **evaluated.validation})
    return Message(RecordDict({codec.METRICS: metrics, **_about(report)}), reply_to=message)


def _about(report: Mapping[str, str | bool] | None) -> dict[str, ConfigRecord]:
    return {codec.CONFIG: ConfigRecord(dict(report))} if report else {}


def _reply(
    message: Message,
    tensors: Tensors,
    count: int,
    metrics: dict[str, Any],
    report: Mapping[str, str | bool] | None = None,
    norms: Mapping[str, codec.KnownNorm] | None = None,
) -> Message:
    about = codec.make_record(MetricRecord, {"num-examples": count, **metrics}.items())
    records = {codec.ARRAYS: codec.to_record(tensors, norms), codec.METRICS: about, **_about(report)}
    return Message(codec.make_record(RecordDict, records.items()), reply_to=message)
