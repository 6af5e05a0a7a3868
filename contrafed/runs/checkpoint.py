"""Write and read checkpoints: all that a run needs to resume as if it had never stopped, in safetensors and JSON.

    RUN/checkpoints/000020/server.safetensors   the global model and the strategy's tensors
    RUN/checkpoints/000020/state.json           round, configuration, lengths of the logs, the file of each client
    RUN/checkpoints/000020/personal-best/       the clients' best models so far, with save_personal
    RUN/checkpoints/clients/7-20.safetensors      the state of client 7, last changed in round 20

A checkpoint's folder gets its name by one rename after all of it is written. So a killed run leaves only complete ones. Nothing
is pickled, so loading a foreign file runs no code. Random draws and availability are functions of the round and need no state.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from contrafed.config.run_config import HOW_IT_RUNS, ORIGIN, counts
from contrafed.core.disk import PRIVATE, checksum, sync
from contrafed.core.errors import UserError
from contrafed.core.run_folder import MAX_LOG_BYTES, add_later_keys, check_regular
from contrafed.core.schema import describe_differences, flatten_keys, plain_numbers
from contrafed.core.tensors import Tensors, align, read, select_prefix, write
from contrafed.engines.personal_models import keep_best
from contrafed.runs.packing import pack, unpack

FOLDER, CLIENTS, STATE, SERVER = "checkpoints", "clients", "state.json", "server.safetensors"

# Logs that a run can do without: of wall-clock time, and, without privacy, of the participants, who are in a figure alone.
SPARE_LOGS = ("times", "participants")

# Errors of damaged files.
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, SafetensorError, RecursionError, UserError)
FORMAT = 2  # version of a checkpoint's files. Version 1 has no such key and other names.

ENDING_KEYS = ("early_stop", "target_accuracy", "on_divergence")
# Keys that may differ in a resumed run: they change no result, or only when the run ends. RULING_KEYS are the exception.
FREE_KEYS = (*HOW_IT_RUNS, *ENDING_KEYS, *ORIGIN, "settings")  # settings acts by the keys that it sets


@dataclass
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    server_round: int
    config: dict[str, Any]
    logs: dict[str, int]  # bytes of each log up to here
    log_sums: dict[str, str]  # log -> the checksum of these bytes
    data: str  # the fingerprint of the data, "" where none was taken
    clients: dict[int, str]  # partition id -> file of its client state
    sums: dict[str, str]  # file -> its checksum
    state: Any  # the strategy's state, packed
    grid: dict[str, Any]  # what the grid needs to resume, for devices, which keep their client state, and empty otherwise
    anchor: str = ""  # the checkpoint after which replies were last accepted
    weights: Mapping[str, str] = field(default_factory=dict)  # the fingerprints of the files of initial weights, by key
    reads_num_rounds: bool = True  # whether the method has read the number of rounds, which then may not change

    @property
    def is_last(self) -> bool:
        """Whether it is of its run's last planned round."""
        return self.server_round == self.config.get("num_rounds")

    def server(self) -> tuple[Tensors, dict[str, Any]]:
        """Return the global model and the strategy's state."""
        tensors = {name: align(value) for name, value in read(self.path / SERVER).items()}
        return select_prefix(tensors, "model"), unpack(self.state, tensors)

    def client_states(self) -> Iterator[tuple[int, Tensors]]:
        """Yield each client's state by partition id, as copies, because the files may be overwritten."""
        for client, file in self.clients.items():
            yield client, {name: value.clone() for name, value in read(self.path.parent / CLIENTS / file).items()}


class Checkpoints:
    """Writes a run's checkpoints and keeps the last few."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        resumed: Checkpoint | None,
        data: str = "",
        weights: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare the folder.

        Args:
            folder: The run's folder.
            config: The run's configuration.
            resumed: The checkpoint that the run resumed from. In the same folder, files of unchanged clients are kept.
            data: The fingerprint of the data.
            weights: The fingerprints of the files of initial weights.
        """
        self.folder, self.data, self.weights = folder / FOLDER, data, dict(weights or {})
        self.config = dict(config)
        self.keep: int = config["checkpoint_keep"]
        own = resumed if resumed is not None and resumed.path.parent.resolve() == self.folder.resolve() else None
        self.clients: dict[int, str] = {} if own is None else dict(own.clients)
        self.sums: dict[str, str] = {} if own is None else dict(own.sums)  # by a client's file
        (self.folder / CLIENTS).mkdir(parents=True, exist_ok=True)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._spare: list[Path] = []  # files of clients that no kept checkpoint needs
        # The newest checkpoint after which replies were accepted: the last good one if later ones hold a ruined model.
        self.anchor = "" if own is None else own.anchor
        self.kept: list[tuple[Path, set[str]]] = []  # the checkpoints here, oldest first, and the clients' files of each
        for path in list_checkpoints(self.folder):
            found = _read(path) if own is not None and int(path.name) <= own.server_round else None
            if found is not None:
                self.kept.append((path, set(found.clients.values())))
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
        log_sums: Mapping[str, str] | None = None,
        accepted: bool = False,
        reads_num_rounds: bool = True,
    ) -> None:
        """Write a checkpoint while the run continues.

        Model and state are copied before this returns. Client states are never written to, only replaced.

        Args:
            server_round: The round.
            model: The global model.
            state: The strategy's state.
            changed: Client states that changed since the last checkpoint, by partition id.
            logs: Bytes of each log that belong to it.
            grid: What the grid itself needs to resume.
            log_sums: Checksums of these bytes.
            accepted: Whether a reply was accepted since the last checkpoint. The newest such one is never pruned.
            reads_num_rounds: As in ``Checkpoint``.

        Raises:
            Exception: The error of the previous checkpoint, if it failed.
        """
        self.wait()
        if accepted and self.kept:
            self.anchor = self.kept[-1][0].name
        tensors = {f"model/{name}": value for name, value in model.items()}
        about = {"round": server_round, "logs": dict(logs), "log_sums": dict(log_sums or {}), "grid": dict(grid or {})}
        about |= {"anchor": self.anchor, "reads_num_rounds": reads_num_rounds, "state": pack(state, "state", tensors)}
        copies = {name: value.detach().cpu().clone() for name, value in tensors.items()}
        part = self.folder / f".{server_round:06d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        keep_best(self.folder.parent, part)  # before another evaluation replaces them
        self._writing = self._writer.submit(self._write, server_round, copies, dict(changed), about)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises its error if it failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        """Wait for the last checkpoint, end the writing thread, and delete files that no checkpoint needs."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            for file in self._spare:
                file.unlink(missing_ok=True)

    def _write(self, server_round: int, server: Tensors, changed: Mapping[int, Tensors], about: Mapping[str, Any]) -> None:
        """Write a checkpoint. A power failure at any moment leaves it complete, or the previous ones unchanged.

        All files that it names are on the disk under their final names before it gets its own. Files that nothing needs any
        more are deleted afterwards. They are overwritten only after the deletion is on the disk.
        """
        part, target = self.folder / f".{server_round:06d}.part", self.folder / f"{server_round:06d}"
        try:
            written = self._write_clients(server_round, changed)
            write(part / SERVER, server)
            self.sums |= {file.name: checksum(file) for file in written}
            sums = {SERVER: checksum(part / SERVER)} | {file: self.sums[file] for file in self.clients.values()}
            content = {
                **about,
                "format": FORMAT,
                "data": self.data,
                "weights": self.weights,
                "config": self.config,
                "clients": self.clients,
                "sums": sums,
            }
            (part / STATE).write_text(json.dumps({"sha256": _digest(content), **content}), encoding="utf-8")
            logs = [self.folder.parent / f"{name}.csv" for name in about["logs"]]
            for path in (*written, self.folder / CLIENTS, *logs, part / SERVER, part / STATE, part):
                sync(path)
            os.replace(part, target)
        except OSError:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync(self.folder)
        self.kept.append((target, set(self.clients.values())))
        self._prune()

    def _write_clients(self, server_round: int, changed: Mapping[int, Tensors]) -> list[Path]:
        """Write the client states that changed, and return their files."""
        written, files = [], {client: f"{client}-{server_round}.safetensors" for client in changed}
        self.clients |= files
        # An interrupted checkpoint of this round may have left files with these names.
        self._spare = [file for file in self._spare if file.name not in files.values()]
        for client, tensors in changed.items():
            path = self.folder / CLIENTS / files[client]
            # Overwrite an old file, because pages that the system already has are up to fifteen times as fast as new ones.
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
        self.sums = {file: self.sums[file] for file in self.clients.values()}
        self._spare = [file for file in (self.folder / CLIENTS).iterdir() if file.name not in used]


def find(where: str | Path, before_end: bool = False) -> Checkpoint | None:
    """Return the last complete checkpoint of a run's folder, or the one at ``where`` itself. None if there is none.

    With ``before_end`` it is not of the last planned round.
    """
    where = Path(where).expanduser()
    paths = [where] if (where / STATE).is_file() else reversed(list_checkpoints(where / FOLDER))
    whole = (found for path in paths if (found := _read(path)) is not None)
    return next((found for found in whole if not (before_end and found.is_last)), None)


def find_extensible(where: str | Path, last: Checkpoint, num_rounds: int) -> Checkpoint:
    """Return the checkpoint in ``where`` from which a run can continue to another number of rounds.

    The result equals a run that had ``num_rounds`` from the beginning. The checkpoint of the last planned round is of no use
    for this, because some methods train for the last evaluation, and late replies are lost there.

    Args:
        where: The run's folder, or a checkpoint.
        last: The last checkpoint there.
        num_rounds: The new number of rounds.

    Raises:
        UserError: If there is none.
    """
    planned, found = last.config.get("num_rounds"), find(where, before_end=True) if last.is_last else last
    why, fix = "", f"num_rounds={planned}, or begin the run in another folder"
    if last.grid:
        why = "and devices keep no older state"
    elif last.reads_num_rounds:
        why = "on which its method depends"
    elif found is None:
        why = "and there is no checkpoint before its last round"
    elif num_rounds <= found.server_round:
        why, fix = f"and of round {found.server_round}", "a larger number"
    if why or found is None:
        raise UserError(f"resume: num_rounds={num_rounds}: {last.path} is of a run of {planned} rounds, {why}. Fix: {fix}")
    return found


def check_same(
    path: Path, stored: Mapping[str, Any], config: Mapping[str, Any], compares_ends: bool = False, free: Collection[str] = ()
) -> None:
    """Raise ``UserError`` with the keys that differ, without ``free``.

    They are compared without ``FREE_KEYS``, but with ``ENDING_KEYS`` if ``compares_ends``.
    """
    old, new = flatten_keys(add_later_keys(stored)), flatten_keys(config)
    differ = [
        key
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and key not in free
        if counts(key, FREE_KEYS) or (compares_ends and key in ENDING_KEYS)
    ]
    if differ:
        raise UserError(f"resume: {path} is of another configuration: {describe_differences(old, new, differ)}")


def identity(config: Mapping[str, Any]) -> str:
    """Return a text that two configurations of the same run share: all keys that change a number.

    If a scale makes cells of a table equal, it also contains which cell it is.
    """
    flat = sorted(plain_numbers(flatten_keys(add_later_keys(config))).items())
    more = {*ENDING_KEYS, *(["published"] if config.get("scale") else [])}
    return json.dumps({key: v for key, v in flat if v is not None and (counts(key, FREE_KEYS) or key.split(".")[0] in more)})


def check_logs(checkpoint: Checkpoint) -> None:
    """Raise ``UserError`` unless the logs that a checkpoint cannot do without are there as they were written."""
    for name in find_damaged_logs(checkpoint):
        if name not in SPARE_LOGS or (
            name == "participants" and flatten_keys(checkpoint.config).get("privacy.name", "none") != "none"
        ):
            log = checkpoint.path.parent.parent / f"{name}.csv"
            raise UserError(
                f"resume: {log} is missing, shorter or other than when {checkpoint.path.name} was written. "
                "Fix: put it back as it was, or begin the run in another folder"
            )


def find_damaged_logs(checkpoint: Checkpoint) -> list[str]:
    """Return the logs that do not begin with what was written when the checkpoint was."""
    damaged = []
    for name, size in checkpoint.logs.items():
        try:
            with check_regular(checkpoint.path.parent.parent / f"{name}.csv", MAX_LOG_BYTES).open("rb") as file:
                content = file.read(size)
        except (OSError, UserError):
            content = b""
        wanted = checkpoint.log_sums.get(name)
        if len(content) < size or (wanted is not None and hashlib.sha256(content).hexdigest() != wanted):
            damaged.append(name)
    return damaged


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, complete or not, oldest first."""
    return sorted(path for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def build_version_error(path: Path) -> UserError:
    """Return the error of a checkpoint that another version wrote."""
    return UserError(f"resume: {path} is a checkpoint of another Contrafed. Fix: name another output_dir, or delete it")


def _read(path: Path) -> Checkpoint | None:
    """Return the checkpoint in ``path``, None if a file is missing or changed. Raises ``UserError`` for another version's."""
    content = _read_state(path / STATE)
    if content is None:
        return None
    if content.get("format") != FORMAT:
        raise build_version_error(path)
    try:
        clients, sums = {int(client): str(file) for client, file in content["clients"].items()}, dict(content["sums"])
        for name in (SERVER, *clients.values()):
            check_regular(path / name if name == SERVER else path.parent / CLIENTS / name, MAX_LOG_BYTES << 8)
            if checksum(path / name if name == SERVER else path.parent / CLIENTS / name) != sums[name]:
                return None
        config, logs, log_sums, grid = (dict(content[key]) for key in ("config", "logs", "log_sums", "grid"))
        data, anchor, weights = str(content["data"]), str(content.get("anchor", "")), dict(content.get("weights", {}))
        server_round, reads = int(content["round"]), bool(content.get("reads_num_rounds", True))
        state = content["state"]
        found = Checkpoint(path, server_round, config, logs, log_sums, data, clients, sums, state, grid, anchor, weights, reads)
        found.server()
        return found
    except DAMAGED:
        return None


def _read_state(path: Path) -> dict[str, Any] | None:
    """Return what a checkpoint's JSON holds, None if it is damaged. Version 1 has no checksum."""
    try:
        content: dict[str, Any] = json.loads(check_regular(path, MAX_LOG_BYTES).read_text(encoding="utf-8"))
        is_old = "config" in content and "sha256" not in content
        return content if is_old or content.pop("sha256") == _digest(content) else None
    except DAMAGED:
        return None


def _digest(content: Any) -> str:
    """Return the SHA-256 of a checkpoint's JSON without its checksum."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
