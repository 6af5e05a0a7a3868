"""Time functions in turns, and run whole runs on random images."""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def in_turns(functions: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each function. They take turns, and the first turn is excluded."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            if turn:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def compose_on(folder: Path, *overrides: str, data: str = "images.npz") -> Any:
    """Return the composed configuration on the random images."""
    from contrafed import compose

    return compose("dataset=npz", f"dataset.path={folder / data}", *overrides)


def run_logged(folder: Path, *overrides: str, data: str = "images.npz") -> tuple[list[list[str]], dict[str, Any]]:
    """Run an experiment, and return the rows of times.csv and the summary."""
    from contrafed import run

    with tempfile.TemporaryDirectory(dir=folder) as out:
        sys.stdout, kept = sys.stderr, sys.stdout
        try:
            summary = run(compose_on(folder, *overrides, f"output_dir={out}/run", data=data))
        finally:
            sys.stdout = kept
        rows = (Path(out) / "run" / "times.csv").read_text().splitlines()[1:]
    return [row.split(",") for row in rows], summary


def seconds_of(rows: list[list[str]], skip: int) -> float:
    """Return the median seconds of the rounds after the first ``skip``."""
    return statistics.median(float(row[1]) for row in rows[skip:])
