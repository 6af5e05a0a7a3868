"""Checkpoints: everything a run needs to go on as if it had never stopped, in safetensors and JSON.

    RUN/checkpoints/000020/server.safetensors   the global model and the strategy's tensors
    RUN/checkpoints/000020/state.json           round, configuration, how far the logs were, what each node's file is
    RUN/checkpoints/nodes/7-20.safetensors      what node 7 remembered when it last changed, after round 20

A checkpoint's folder gets its name by one rename when all of it is written, so a killed run leaves whole ones only. Nothing is
pickled: loading a foreign file runs no code. Random draws and availability are functions of the round and need no state.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from contrafed.config.run_config import HOW_IT_RUNS, ORIGIN, counts
from contrafed.core.disk import sync
from contrafed.core.errors import UserError
from contrafed.core.schema import dotted, plain_numbers
from contrafed.core.tensors import PRIVATE, Tensors, group, read, write

FOLDER, NODES, STATE, SERVER = "checkpoints", "nodes", "state.json", "server.safetensors"

ENDING_KEYS = ("early_stop", "target_accuracy", "on_divergence")
# Keys that may differ when a run goes on: they change no result, or only when the run ends. RULING_KEYS are the exception.
FREE_KEYS = (*HOW_IT_RUNS, *ENDING_KEYS, *ORIGIN)


@dataclass
class Checkpoint:
    """A checkpoint on disk, found whole."""

    path: Path
    server_round: int
    config: dict[str, Any]
    logs: dict[str, int]  # bytes of each log up to here
    nodes: dict[int, str]  # partition id -> file of what it remembers
    sums: dict[str, str]  # file -> its checksum
    state: Any  # the strategy's state, packed
    grid: dict[str, Any]  # what the grid must know to go on: of devices, which keep what they remember; else empty
    anchor: str = ""  # the checkpoint after which replies were last accepted

    def server(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the global model and the strategy's state."""
        tensors = read(self.path / SERVER)
        return group(tensors, "model"), unpack(self.state, tensors)

    def memories(self) -> Iterator[tuple[int, Tensors]]:
        """Yield what each node remembered, by partition id: copies, since the files may be written over."""
        for node, file in self.nodes.items():
            yield node, {name: value.clone() for name, value in read(self.path.parent / NODES / file).items()}


class Checkpoints:
    """Writes a run's checkpoints and keeps the last few."""

    def __init__(self, folder: Path, config: Mapping[str, Any], resumed: Checkpoint | None) -> None:
        """``resumed`` is where the run went on from; in its own folder, files of nodes that did not change are kept."""
        self.folder = folder / FOLDER
        self.config = dict(config)
        self.keep: int = config["checkpoint_keep"]
        own = resumed if resumed is not None and resumed.path.parent.resolve() == self.folder.resolve() else None
        self.nodes: dict[int, str] = {} if own is None else dict(own.nodes)
        self.sums: dict[str, str] = {} if own is None else dict(own.sums)  # by a node's file
        (self.folder / NODES).mkdir(parents=True, exist_ok=True)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._spare: list[Path] = []  # files of nodes that no kept checkpoint needs
        # The newest checkpoint after which replies were accepted: the last good one where later ones hold a ruined model.
        self.anchor = "" if own is None else own.anchor
        self.kept: list[tuple[Path, set[str]]] = []  # the checkpoints here, oldest first, and the node files of each
        for path in numbered(self.folder):
            found = _read(path) if own is not None and int(path.name) <= own.server_round else None
            if found is not None:
                self.kept.append((path, set(found.nodes.values())))
            else:  # damaged, or of a run that is being overwritten
                shutil.rmtree(path, ignore_errors=True)

    def save(
        self,
        server_round: int,
        model: Tensors,
        state: dict[str, Any],
        changed: Mapping[int, Tensors],
        logs: Mapping[str, int],
        grid: Mapping[str, Any] | None = None,
        accepted: bool = False,
    ) -> None:
        """Write a checkpoint while the run goes on; ``changed`` is what nodes remember whose memory changed since the last one.

        ``logs`` is how many bytes of each log belong to it, ``grid`` what the grid itself must know to go on.
        ``accepted``: whether any reply was accepted since the last checkpoint. The newest such checkpoint is never pruned.

        The model and the state are copied before this returns. What nodes remember is never written to, only replaced. Raises
        what went wrong with the checkpoint before.
        """
        self.wait()
        if accepted and self.kept:
            self.anchor = self.kept[-1][0].name
        tensors = {f"model/{name}": value for name, value in model.items()}
        about = {
            "round": server_round,
            "logs": dict(logs),
            "grid": dict(grid or {}),
            "anchor": self.anchor,
            "state": pack(state, "state", tensors),
        }
        copies = {name: value.detach().cpu().clone() for name, value in tensors.items()}
        self._writing = self._writer.submit(self._write, server_round, copies, dict(changed), about)

    def wait(self) -> None:
        """Return when the last checkpoint is on disk; raises what went wrong with it."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the last checkpoint, end the thread that writes and delete files that no checkpoint needs."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            for file in self._spare:
                file.unlink(missing_ok=True)

    def _write(self, server_round: int, server: Tensors, changed: Mapping[int, Tensors], about: Mapping[str, Any]) -> None:
        """Write a checkpoint so that a loss of power at any moment leaves it whole or the ones before as they were.

        Everything that it names is on the disk, under the name it is found by, before it gets its own; what nothing needs any
        more is deleted after that, and written over after the deletion is on the disk.
        """
        part, target = self.folder / f".{server_round:06d}.part", self.folder / f"{server_round:06d}"
        try:
            written = self._write_nodes(server_round, changed)
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            write(part / SERVER, server)
            self.sums |= {file.name: checksum(file) for file in written}
            sums = {SERVER: checksum(part / SERVER)} | {file: self.sums[file] for file in self.nodes.values()}
            content = {**about, "config": self.config, "nodes": self.nodes, "sums": sums}
            (part / STATE).write_text(json.dumps(content), encoding="utf-8")
            logs = [self.folder.parent / f"{name}.csv" for name in about["logs"]]
            for path in (*written, self.folder / NODES, *logs, part / SERVER, part / STATE, part):
                sync(path)
            os.replace(part, target)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync(self.folder)
        self.kept.append((target, set(self.nodes.values())))
        self._prune()

    def _write_nodes(self, server_round: int, changed: Mapping[int, Tensors]) -> list[Path]:
        """Write what nodes remember that changed; returns the files."""
        written, files = [], {node: f"{node}-{server_round}.safetensors" for node in changed}
        self.nodes |= files
        # A checkpoint of this round that was cut off may have left files of these very names.
        self._spare = [file for file in self._spare if file.name not in files.values()]
        for node, tensors in changed.items():
            path = self.folder / NODES / files[node]
            # Over an old file: pages that the system has already are up to fifteen times as fast as new ones.
            if self._spare:
                os.replace(self._spare.pop(), path)
            write(path, tensors, mode=PRIVATE)
            written.append(path)
        return written

    def _prune(self) -> None:
        old = [(path, files) for path, files in self.kept[: -self.keep] if path.name != self.anchor]
        for path, _ in old:
            shutil.rmtree(path, ignore_errors=True)
        if old:
            sync(self.folder)
        self.kept = [each for each in self.kept if each not in old]
        used = set().union(*(files for _, files in self.kept))
        self.sums = {file: self.sums[file] for file in self.nodes.values()}
        self._spare = [file for file in (self.folder / NODES).iterdir() if file.name not in used]


def find(where: str | Path) -> Checkpoint | None:
    """Return the last whole checkpoint of a run's folder, or the one that ``where`` itself is; None where there is none."""
    where = Path(where).expanduser()
    if (where / STATE).is_file():
        return _read(where)
    return next((found for path in reversed(numbered(where / FOLDER)) if (found := _read(path)) is not None), None)


def check_same(path: Path, stored: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ``UserError`` naming the keys in which ``config`` differs from what is ``stored`` in more than ``FREE_KEYS``."""
    old, new = dotted(stored), dotted(config)
    differ = [
        f"{key}={new.get(key, '(none)')} (there: {old.get(key, '(none)')})"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and counts(key, FREE_KEYS)
    ]
    if differ:
        raise UserError(f"resume: {path} is of another configuration: {'; '.join(differ)}")


def identity(config: Mapping[str, Any]) -> str:
    """Return what two configurations of the same run have in common: all that moves a number.

    And, where a scale makes cells of a table alike, which of them it is.
    """
    flat = sorted(plain_numbers(dotted(config)).items())
    more = {*ENDING_KEYS, *(["published"] if config.get("scale") else [])}
    return json.dumps({key: v for key, v in flat if v is not None and (counts(key, FREE_KEYS) or key.split(".")[0] in more)})


def check_logs(checkpoint: Checkpoint) -> None:
    """Raise ``UserError`` unless the logs that a checkpoint goes with are there and reach that far."""
    for name, size in checkpoint.logs.items():
        log = checkpoint.path.parent.parent / f"{name}.csv"
        if not log.is_file() or log.stat().st_size < size:
            raise UserError(f"resume: {log} is missing or shorter than when {checkpoint.path.name} was written")


def pack(value: Any, place: str, tensors: Tensors) -> Any:
    """Return ``value`` as JSON, its arrays in ``tensors[place]``: tensors, arrays, numbers, text, and containers of these.

    Dictionaries, lists and tuples. All comes back as what it was, of its own type; keys of dictionaries are text or whole
    numbers, such as partition ids. Raises ``TypeError`` for anything else.
    """
    if isinstance(value, str):  # NumPy's text too
        return {"value": str(value)}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        while place in tensors:  # {"a": {"b": x}, "a/b": y}
            place += "'"
        # A copy: of what runs backwards, or may not be written to, torch takes none.
        tensors[place] = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
        return {"tensor" if isinstance(value, Tensor) else "array" if isinstance(value, np.ndarray) else "number": place}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key, place), pack(item, f"{place}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [pack(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, bool | int | float):
        return {"value": value}
    raise TypeError(f"a strategy's state cannot hold {type(value).__name__} ({place})")


def unpack(packed: Any, tensors: Tensors) -> Any:
    """Return what ``pack`` was given."""
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy().copy()
    if kind == "number":
        return tensors[content].numpy()[()]
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(unpack(item, tensors) for item in content)
    return content


def put_back(held: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Give a state what a checkpoint's has, in place: tables of the state that somebody holds are filled, not replaced."""
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(held.get(key), dict):
            for gone in held[key].keys() - value.keys():
                del held[key][gone]
            put_back(held[key], value)
        else:
            held[key] = value


def _key(key: Any, place: str) -> str | int:
    """Return a dictionary's key as JSON gives it back."""
    if isinstance(key, str):
        return key
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key)
    raise TypeError(f"a strategy's state has dictionaries whose keys are text or whole numbers, not {key!r} ({place})")


def numbered(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, whole or not, oldest first."""
    return sorted(path for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def _read(path: Path) -> Checkpoint | None:
    """Return the checkpoint in ``path``, or None when a file is missing or not what was written."""
    try:
        content = json.loads((path / STATE).read_text(encoding="utf-8"))
        nodes, sums = {int(node): str(file) for node, file in content["nodes"].items()}, dict(content["sums"])
        for name in (SERVER, *nodes.values()):
            if checksum(path / name if name == SERVER else path.parent / NODES / name) != sums[name]:
                return None
        config, logs, grid = (dict(content.get(key, {})) for key in ("config", "logs", "grid"))
        found = Checkpoint(
            path, int(content["round"]), config, logs, nodes, sums, content["state"], grid, str(content.get("anchor", ""))
        )
        found.server()
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, SafetensorError):
        return None


def checksum(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, by which it is known to be what was written."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
