"""Measure the CPU time of a stack's bookkeeping, and of the host work of a stacked round. CPU time bears a busy machine."""

import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from timing import run_logged

CLIENTS, CALLS = 25, 80
# Ten tensors of four numbers for each client.
NAMES = [f"layer{number}.{kind}" for number in range(5) for kind in ("weight", "bias")]


def cpu_of(function: Callable[[], Any]) -> float:
    """Return the median CPU milliseconds of a call."""
    times = []
    for _ in range(CALLS):
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times[CALLS // 8 :])


def client_state_function() -> Callable[[], None]:
    """Return a function that reads and writes the state of a stack, with PMFL's names."""
    import torch

    from contrafed.engines.client_state import ClientStateStore
    from contrafed.training.client_stack import stack_rows, unstack_copies

    state = {f"iterates/{name}": torch.randn(CLIENTS, 5, 4) for name in NAMES}
    state |= {f"previous/{name}": torch.randn(CLIENTS, 4) for name in NAMES}
    state |= dict.fromkeys(("num_pushed", "participations"), torch.zeros(CLIENTS, dtype=torch.int64))
    store = ClientStateStore(0, sys.maxsize, None)

    def store_rows(tensors: dict[str, Any]) -> None:
        for client, row in enumerate(unstack_copies(tensors, CLIENTS)):
            store.store(client, row)

    def client_state() -> None:
        rows = [store.get(client) for client in range(CLIENTS)]
        store_rows({name: stack_rows([row[name] for row in rows], lambda tensor: tensor) for name in rows[0]})

    store_rows(state)
    return client_state


def draw_functions() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return functions that draw a stack's augmentation, and its batches with their distinct images."""
    import numpy as np
    import torch

    from contrafed.core.randomness import generator
    from contrafed.training.augment import compute_changes, draw_uniform
    from contrafed.training.batches import Batches
    from contrafed.training.local_training import LocalTraining

    workspace = SimpleNamespace(device="cpu", dtype=torch.float32)
    local = LocalTraining(None, 5, 16, "keep", "sgd", 0.1, 1.0, 1.0, 0.0, 0.0, 0.0, None, False, (), False)
    parts = [np.arange(160) + 160 * client for client in range(CLIENTS)]

    def augment() -> Any:
        uniform = [draw_uniform(("crop", "flip"), 80, 0, "batches", 7, client) for client in range(CLIENTS)]
        return compute_changes(torch.cat(uniform), ("crop", "flip"), 32)

    def draw() -> Any:
        drawn = [local.batches(part, generator(0, "batches", 7, client)) for client, part in enumerate(parts)]
        return Batches(workspace, drawn)._distinct

    return augment, draw


def functions_of_a_stack() -> dict[str, Callable[[], Any]]:
    """Return the parts of a stack's bookkeeping, by name, each as a function that does it once."""
    import torch
    from flwr.app import ConfigRecord, Message, RecordDict

    from contrafed.client_app.app import _decode_received, _reply
    from contrafed.core import codec
    from contrafed.core.weighted_sum import weighted_sum
    from contrafed.engines.worker import copy_records, identify
    from contrafed.server.replies import read_reply
    from contrafed.training.client_stack import compute_row_norms, unstack_views

    identify()
    upload = {f"delta/{name}": torch.randn(CLIENTS, 4) for name in NAMES}
    broadcast = codec.to_record({f"model/{name}": torch.randn(4) for name in NAMES})
    config = ConfigRecord({"server-round": 1, "settings": "x" * 3000, "cost": 5})
    losses = {"loss": 1.0, "task": 1.0, "contrast": 0.1}
    older = [{name: torch.randn(4) for name in upload} for _ in range(5)]

    def messages() -> list[Message]:
        records = [(codec.ARRAYS, broadcast), (codec.CONFIG, config)]
        contents = [codec.make_record(RecordDict, records) for _ in range(CLIENTS)]
        asked = copy_records([Message(content, 1000 + k, "train", group_id="1") for k, content in enumerate(contents)])
        codec.config_of(asked[0]), _decode_received(asked)
        rows = unstack_views(upload, CLIENTS)
        replies = zip(asked, rows, compute_row_norms(upload, rows), strict=True)
        return [_reply(message, row, 160, losses, {}, norms) for message, row, norms in replies]

    augment, draw = draw_functions()
    replies, spec = messages(), dict.fromkeys(upload, (4,))
    models = [*older, *unstack_views(upload, CLIENTS)]
    return {
        "client state in and out": client_state_function(),
        "messages and records": messages,
        "augmentation draws": augment,
        "reply checks": lambda: [read_reply(k, m, spec, {}, 160, None, ("task", "contrast")) for k, m in enumerate(replies)],
        "batch draws": draw,
        "weighted sum": lambda: weighted_sum(models, [0.1] * len(models)),
    }


def bookkeeping(folder: Path, repeats: int) -> None:
    """Measure what a stack of 25 clients with ten tiny tensors each takes besides computation."""
    import torch

    torch.set_num_threads(1)
    functions = functions_of_a_stack()
    turns = [{name: cpu_of(function) for name, function in functions.items()} for _ in range(repeats)]
    print("| part | CPU ms |\n| --- | --- |")
    for name in functions:
        print(f"| {name} | {statistics.median(turn[name] for turn in turns):.2f} |")
    print(f"| all | {statistics.median(sum(turn.values()) for turn in turns):.2f} |")


@contextlib.contextmanager
def time_calls(*places: tuple[Any, str]) -> Iterator[list[float]]:
    """Add the CPU seconds of functions, each a pair of owner and name, to the yielded list's only number."""
    spent, within, originals = [0.0], [False], [getattr(owner, name) for owner, name in places]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if within[0]:
                return function(*args, **named)
            within[0], began = True, time.process_time()
            try:
                return function(*args, **named)
            finally:
                spent[0] += time.process_time() - began
                within[0] = False

        return call

    for (owner, name), original in zip(places, originals, strict=True):
        setattr(owner, name, wrap(original))
    try:
        yield spent
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def host(folder: Path, repeats: int) -> None:
    """Measure rounds of 25 of 250 clients as one stack, without their steps, the passes of reference models, and images."""
    from contrafed.clients import pmfl
    from contrafed.runs.output import RoundLog
    from contrafed.training import batches, loop, workspace

    computation = (
        (loop, "training_step"), (batches, "each_image"), (pmfl, "each_image"),
        (workspace.Workspace, "images"), (workspace.Workspace, "normalise_images"),
    )  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {"fedavg": [], "pmfl": []}
    write = RoundLog.write
    for method, rounds in [pair for _ in range(repeats) for pair in found.items()]:
        with time_calls(*computation) as spent:
            marks: list[tuple[float, float]] = []

            def note(self: Any, done: Any, spent: list[float] = spent, marks: list[tuple[float, float]] = marks) -> None:
                write(self, done)
                marks.append((time.process_time(), spent[0]))

            RoundLog.write = note  # type: ignore[method-assign]
            try:
                run_logged(
                    folder, f"strategy={method}", "num_clients=250", "partition=sampled", "model=mlp", "model.hidden=[8]",
                    "participation=uniform", "participation.select=25", "eval_every=1000000", "engine=local",
                    "engine.stack_size=25", "num_rounds=30",
                )  # fmt: skip
            finally:
                RoundLog.write = write  # type: ignore[method-assign]
        steps = [(b[0] - a[0] - (b[1] - a[1]), b[1] - a[1]) for a, b in itertools.pairwise(marks[10:])]
        rounds.append(tuple(1e3 * statistics.median(column) for column in zip(*steps, strict=True)))  # type: ignore[arg-type]
    print("| method | host, CPU ms a round | computation, CPU ms a round |\n| --- | --- | --- |")
    for method, rounds in found.items():
        own, computed = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"| {method} | {own:.1f} | {computed:.1f} |")
