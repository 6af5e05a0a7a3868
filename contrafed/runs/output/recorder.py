"""Write a run's files: tidy CSV files, figures, a summary, and the model."""

import contextlib
import csv
import importlib.metadata
import json
import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from contrafed.core.disk import checksum, replace
from contrafed.runs.output.folder import CLAIM
from contrafed.runs.output.log_file import LogFile
from contrafed.runs.output.series import SCOPES, points_of, shown_clients, summary_of_curves

if TYPE_CHECKING:  # importing torch takes longer than the command line's help
    from numpy.typing import ArrayLike
    from torch import Tensor

# train, test and validation: the model on training examples, on the test or validation set (global) or on each client's test or
# validation part (personal). clients: the global model on the clients' test parts. fit: values that clients report from
# training. system: counts and bytes. time: simulated seconds, with a clock.
SPLITS = ("train", "test", "validation", "clients", "fit", "system", "time")

LOGS = ("metrics", "clients", "participants", "times")

# First rounds that are excluded from medians of seconds.
WARM_UP_ROUNDS = 3


class RunRecorder:
    """Writes a run's folder during the run. Rows are buffered, and ``flush`` writes them once a round.

    ``metrics.csv`` holds no wall-clock time, so that the same seed gives the same bytes. Times are in ``times.csv``.
    """

    def __init__(self, folder: Path, config_text: str, first_round: int = 1, logs: Mapping[str, int] | None = None) -> None:
        """Open the files in ``folder``.

        ``logs`` has the bytes of each log that belong to a resumed run. The rest is cut off. A log without an entry is new.
        """
        self.folder = folder
        self.first_round = first_round
        self.note, self.title = "", ""  # the notice on every figure, and what was run
        self.began = time.perf_counter()
        claim = folder / CLAIM
        if not claim.exists() or claim.read_text(encoding="utf-8") != config_text:
            _replace(claim, config_text)  # never half written, because a sweep identifies the run by it
        (folder / "summary.json").unlink(missing_ok=True)  # of an earlier attempt
        self._config_text, sizes = config_text, logs or {}
        self._files = {name: LogFile(folder / f"{name}.csv", sizes.get(name)) for name in LOGS}
        headers = {
            "metrics": "round,scope,split,metric,value",
            "clients": "round,client,metric,value",
            "participants": "round,client",
            "times": "round,seconds,memory_seconds,memory_device,memory_host,memory_disk,aggregate_seconds,largest_weight",
        }
        self._rows: dict[str, list[str]] = {name: [] if name in sizes else [header] for name, header in headers.items()}
        self._curves: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
        self._sums: dict[str, float] = defaultdict(float)
        # per round: the number of participants, and which shown clients participated
        self._seen: list[tuple[int, np.ndarray]] = []
        self._shown = np.zeros(0, dtype=np.int64)
        self._class_counts: np.ndarray | None = None
        self._latest: dict[str, float] = {}  # what was recorded since the last call of ``latest``
        self.rounds = 0
        self._earlier = 0.0  # seconds of the rounds of earlier attempts
        if logs is not None:
            self._read_back()
        self.flush()

    def _read_back(self) -> None:
        """Load earlier values from the logs."""
        with (self.folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                t, value = int(row["round"]), float(row["value"])
                self.rounds = max(self.rounds, t)
                if row["split"] == "system":
                    self._sums[row["metric"]] += value
                else:
                    self._curves[row["scope"], row["split"], row["metric"]].append((t, value))
        if self._files["times"].size:
            with (self.folder / "times.csv").open(encoding="utf-8", newline="") as file:
                self._earlier = sum(float(row["seconds"]) for row in csv.DictReader(file))

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each log."""
        self.flush()
        return {name: file.size for name, file in self._files.items()}

    def checksums(self) -> dict[str, str]:
        """Return the checksum of what each log holds."""
        return {name: file.checksum for name, file in self._files.items()}

    def metric(self, server_round: int, scope: str, split: str, name: str, value: float) -> None:
        """Record one value. ``scope`` and ``split`` are listed at the top of this module. Others raise ``ValueError``."""
        if scope not in SCOPES or split not in SPLITS:
            raise ValueError(f"unknown scope '{scope}' or split '{split}'")
        text = str(int(value)) if isinstance(value, int | np.integer) else repr(float(value))
        self._rows["metrics"].append(f"{server_round},{scope},{split},{_cell(name)},{text}")
        if split == "system":
            self._sums[name] += value
        else:
            self._curves[scope, split, name].append((server_round, float(value)))
        self._latest[f"{scope}/{split}/{name}"] = float(value)

    def latest(self) -> dict[str, float]:
        """Return the metrics recorded since the last call, named SCOPE/SPLIT/METRIC, for trackers."""
        latest, self._latest = self._latest, {}
        return latest

    def accuracies(self, scope: str, split: str = "test") -> list[tuple[int, float]]:
        """Return the points (round, accuracy on test or validation examples) of a scope, without the initial model's."""
        return points_of(self._curves, scope, split, "accuracy", self.first_round)

    def total(self, name: str, server_round: int) -> int:
        """Return the sum of a system metric, such as ``bytes_up``, over the rounds up to this one."""
        self.flush()
        with (self.folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["split"], row["metric"]) == ("system", name)]
        return sum(int(row["value"]) for row in rows if int(row["round"]) <= server_round)

    def simulated_time(self, server_round: int | None = None) -> float | None:
        """Return the simulated seconds up to the end of a round, or of the last round. None without a clock."""
        times = dict(self._curves.get(("global", "time", "simulated_time"), []))
        return times.get(self.rounds if server_round is None else server_round)

    def clients(self, server_round: int, ids: "ArrayLike", name: str, values: "ArrayLike") -> None:
        """Record ``values`` (m,) of the clients ``ids`` (m,). Raises ``ValueError`` if their numbers differ."""
        start, middle = f"{server_round},", f",{_cell(name)},"
        # Lists hold Python's own numbers, whose repr is short and fast.
        pairs = zip(np.asarray(ids).tolist(), np.asarray(values).tolist(), strict=True)
        self._rows["clients"] += [f"{start}{client}{middle}{value!r}" for client, value in pairs]

    def participants(self, server_round: int, ids: np.ndarray, num_clients: int) -> None:
        """Record the participants: ``ids`` (m,) of 0..num_clients-1.

        The figure keeps at most 200 evenly chosen clients, so that memory stays small for any number of clients.
        """
        self.rounds = server_round
        self.metric(server_round, "global", "system", "participants", len(ids))
        self._rows["participants"] += [f"{server_round},{client}" for client in ids.tolist()]
        self.draw_participants(ids, num_clients)

    @property
    def has_trained(self) -> bool:
        """Whether any reply was valid, also in earlier attempts."""
        return ("global", "fit", "loss") in self._curves

    def past_participants(self, server_round: int) -> list[np.ndarray]:
        """Return the participants of each round up to ``server_round`` of a resumed run, from its log."""
        lines = (self.folder / "participants.csv").read_text(encoding="utf-8").splitlines()[1:]
        rows = np.loadtxt(lines, np.int64, delimiter=",", ndmin=2) if lines else np.zeros((0, 2), dtype=np.int64)
        return np.split(rows[:, 1], np.searchsorted(rows[:, 0], np.arange(2, server_round + 1)))

    def draw_participants(self, ids: np.ndarray, num_clients: int) -> None:
        """Keep a round's participants only for the figure."""
        if not len(self._shown):
            self._shown = shown_clients(num_clients)
        self._seen.append((len(ids), np.flatnonzero(np.isin(self._shown, ids)).astype(np.int16)))

    def partition(self, class_counts: np.ndarray) -> None:
        """Keep the partition (K, C) for its figure."""
        self._class_counts = class_counts

    def time(
        self,
        server_round: int,
        seconds: float,
        aggregating: float,
        memory: tuple[float, int, int, int] | None = None,
        largest_share: float = math.nan,
    ) -> None:
        """Record a round's wall-clock time, and the largest weight in its aggregation.

        Args:
            server_round: The round.
            seconds: Seconds of the whole round.
            aggregating: Seconds of the aggregation.
            memory: Seconds of moving client states, and their bytes on the accelerator, in RAM and on disk.
            largest_share: Largest share of one client in the weighted sum of the replies, NaN without such a sum.
        """
        largest = "" if math.isnan(largest_share) else f"{largest_share:.6f}"
        cost = ",,," if memory is None else f"{memory[0]:.6f},{memory[1]},{memory[2]},{memory[3]}"
        self._rows["times"].append(f"{server_round},{seconds:.6f},{cost},{aggregating:.6f},{largest}")

    def flush(self) -> None:
        """Write and flush what was recorded, so that a killed run leaves everything up to here.

        Raises ``OSError``, and ``RunStopped`` once where another program changed, replaced or removed a log.
        """
        for name, rows in self._rows.items():
            self._files[name].write("\n".join(rows) + "\n" if rows else "")  # also without rows it looks at the file
            rows.clear()

    def restore(self) -> None:
        """Follow a folder that was renamed, or make one that was removed again, with what the logs held."""
        if not self.folder.is_dir():
            self.folder = self._files["metrics"].find_folder() or self.folder
            self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / CLAIM).exists():
            _replace(self.folder / CLAIM, self._config_text)
        for name, file in self._files.items():
            file.restore(self.folder)
            if checksum(file.path) != file.checksum:
                print(f"output_dir: another program changed {name}.csv, which is not what the run wrote", file=sys.stderr)

    def save_model(self, tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> None:
        """Write ``model.safetensors``."""
        from contrafed.core.tensors import write

        write(self.folder / "model.safetensors", tensors, metadata)

    def finish(self, status: str, extra: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``summary.json`` and the figures, and return the summary as in the file.

        Accuracies and their standard deviations are fractions, not percentages. The initial model's evaluation (round 0) is in
        no number, unless the run only evaluates. Seconds are those of this attempt and of the kept rounds of earlier ones.

        Args:
            status: finished, interrupted, diverged (``on_divergence=stop``) or failed.
            extra: Further entries.

        Returns:
            The summary. None is a number that does not exist.
        """
        self.flush()
        summary: dict[str, Any] = {"status": status, **extra, "rounds": self.rounds}
        accuracies = summary_of_curves(self._curves, self.first_round, extra.get("select_on"))
        if not all(map(math.isnan, accuracies.values())):
            summary.pop("not_evaluated", None)
        summary |= accuracies
        seconds = self._earlier + float(extra.get("seconds", time.perf_counter() - self.began))
        summary["seconds"], summary["seconds_per_round"] = seconds, seconds / max(self.rounds, 1)
        summary |= self._phases()
        for name in ("bytes_up", "bytes_down", "replies_rejected", "failures"):
            summary[name] = int(self._sums[name])
        if (simulated := self.simulated_time()) is not None:
            lost = sum(seconds for _, seconds in self._curves.get(("global", "time", "lost_seconds"), []))
            summary |= {"simulated_time": simulated, "lost_seconds": lost, "lost_steps": int(self._sums["lost_steps"])}
        summary = _strict(summary)
        if status == "finished":  # a finished run always has its figures
            self._draw()
        _replace(self.folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
        if status != "finished":
            self._draw()
        return summary

    def _phases(self) -> dict[str, float]:
        """Return the median seconds of a round's local update and of the aggregation (PMFL, Figure 14), NaN without rounds.

        Rounds with an evaluation and the first three rounds, which warm up, are excluded.
        """
        scored = {t for (_, _, name), points in self._curves.items() if name == "accuracy" for t, _ in points}
        with (self.folder / "times.csv").open(encoding="utf-8", newline="", errors="replace") as file:
            # A run that an older version began has no times by phase.
            rows = [row for row in csv.DictReader(file) if row.get("aggregate_seconds") and row["round"].isdigit()]
        rows = [row for row in rows if int(row["round"]) > WARM_UP_ROUNDS and int(row["round"]) not in scored]
        try:
            times = np.array([(float(row["seconds"]), float(row["aggregate_seconds"])) for row in rows]).reshape(-1, 2)
        except (TypeError, ValueError):  # another program changed it
            times = np.zeros((0, 2))
        local, aggregate = np.median([times[:, 0] - times[:, 1], times[:, 1]], axis=1) if len(times) else (math.nan, math.nan)
        return {"local_seconds_median": float(local), "aggregate_seconds_median": float(aggregate)}

    def close(self) -> None:
        """Close every file, also if a write fails. Then raises ``OSError``."""
        with contextlib.ExitStack() as closing:
            for file in self._files.values():
                closing.callback(file.close)
            self.flush()

    def _draw(self) -> None:
        from contrafed.runs.output import figures

        if self._curves:
            figures.accuracy_figure(self.folder / "accuracy.png", dict(self._curves), self.note, self.title)
        if self._seen:
            figures.participation_figure(self.folder / "participation.png", self._seen, self._shown, self.note, self.title)
        if self._class_counts is not None:
            figures.partition_figure(self.folder / "partition.png", self._class_counts, self.note, self.title)


def _replace(path: Path, text: str) -> None:
    """Write a file, which is afterwards either complete or unchanged."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    replace(part, path)


def _cell(name: str) -> str:
    """Return a metric's name as one CSV cell."""
    return '"' + name.replace('"', '""') + '"' if any(mark in name for mark in ',"\n\r') else name


def _strict(value: Any) -> Any:
    """Return ``value`` for strict JSON: NaN and infinities become null, unknown objects their text."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.ndarray | np.generic):
        return _strict(value.tolist())
    return value if value is None or isinstance(value, str | int) else str(value)


@cache
def versions() -> Mapping[str, str]:
    """Return the versions that a run depends on. Imports none of the packages."""
    found = {"python": platform.python_version()}
    for package in ("contrafed", "flwr", "flwr-nightly", "ray", "torch", "torchvision", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package.removesuffix("-nightly")] = importlib.metadata.version(package)
    return MappingProxyType(found)
