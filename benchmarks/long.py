"""Watch a long run from outside: memory and open files of every process, and whether its metrics can be read.

    python benchmarks/long.py --engine local --rounds 5000
    python benchmarks/long.py --engine ray --rounds 5000

Prints megabytes of anonymous memory per process (which it shares with no other process and no file), and its open files. Both
are given after a tenth of the run and at its end. The slope per 1,000 rounds is that of a straight line through the samples
between. The option ``--seconds`` ends the run early, as Ctrl-C would. Linux only.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
TINY_RUN = (
    "strategy=pmfl", "num_clients=25", "participation=uniform", "participation.select=10", "model=mlp", "model.hidden=[8]",
    "model.projection=[6]", "strategy.local.iterations=1", "strategy.local.batch_size=8", "partition.test_fraction=0.2",
    "eval_every=50", "checkpoint_every=100",
)  # fmt: skip
# Share of the rounds that fill caches and are excluded.
WARM_UP_SHARE = 0.1
# Exit status after Ctrl-C.
INTERRUPTED_STATUS = 130


class Sample(NamedTuple):
    """The memory and open files of a process after a round."""

    server_round: int
    megabytes: float
    files: int


def processes(session: int) -> dict[int, str]:
    """Return the processes of a session by id, each with its name. Ray's workers have their current task after a dot."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            stat = (place / "stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == session:
                found[int(place.name)] = (place / "cmdline").read_text().split("\0")[0].rpartition("/")[2].partition(".")[0]
    return found


def look(process: int, server_round: int) -> Sample:
    """Return a process's current sample. Raises ``OSError`` if it has ended."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    kilobytes = next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return Sample(server_round, kilobytes / 1024, len(os.listdir(f"/proc/{process}/fd")))


def last_round(log: Path) -> int:
    """Read ``metrics.csv`` during the run, and return its last round. Raises for a malformed row."""
    if not log.exists():
        return 0
    text = log.read_text(encoding="utf-8")
    rows = list(csv.reader(text.splitlines()))
    for row in rows[1:]:
        int(row[0]), float(row[4])
    assert text.endswith("\n"), f"{log} ends in the middle of a row: {rows[-1]}"
    return int(rows[-1][0]) if len(rows) > 1 else 0


def watch(
    engine: str, rounds: int, every: float, limit: float, folder: Path
) -> tuple[dict[tuple[int, str], list[Sample]], int, float]:
    """Run for ``rounds`` rounds or ``limit`` seconds, and return samples by process, number of reads of metrics, and
    seconds.
    """
    overrides = [*TINY_RUN, f"engine={engine}", f"num_rounds={rounds}", f"output_dir={folder}"]
    command = [sys.executable, str(ROOT / "main.py"), *overrides, *(["engine.workers=2"] if engine == "ray" else [])]
    samples: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    began, reads = time.monotonic(), 0
    with open(folder.with_suffix(".log"), "w") as log:
        run = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        while run.poll() is None:
            time.sleep(every)
            if time.monotonic() - began > limit:
                run.terminate()
                run.wait()
                break
            now, reads = last_round(folder / "metrics.csv"), reads + 1
            for process, name in processes(run.pid).items():
                with suppress(OSError, StopIteration):
                    found = look(process, now)
                    samples[process, name].append(found)
    assert run.returncode in (0, INTERRUPTED_STATUS), folder.with_suffix(".log").read_text()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["failures"] == 0, summary
    return samples, reads, time.monotonic() - began


def slope(samples: list[Sample], column: str) -> tuple[float, float]:
    """Return the slope per 1,000 rounds of a straight line through ``samples``, and its standard error."""
    x = np.array([sample.server_round for sample in samples]) / 1000
    y = np.array([getattr(sample, column) for sample in samples], dtype=float)
    design = np.stack([x - x.mean(), np.ones_like(x)], 1)
    (rate, level), *_ = np.linalg.lstsq(design, y, rcond=None)
    left = y - design @ np.array([rate, level])
    return float(rate), float(np.sqrt((left @ left) / max(len(x) - 2, 1) / ((x - x.mean()) ** 2).sum()))


def main() -> None:
    """Run one engine and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "ray"), default="local")
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end it after so many")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        how = (arguments.engine, arguments.rounds, arguments.every, arguments.seconds)
        samples, reads, seconds = watch(*how, Path(folder) / "run")
    last = max(found[-1].server_round for found in samples.values())
    print(f"engine={arguments.engine}, {last} rounds in {seconds:.0f} s; metrics.csv read {reads} times while it grew\n")
    print("| process | MB after a tenth | at the end | per 1,000 rounds | open files after a tenth | at the end |")
    print("| --- | --- | --- | --- | --- | --- |")
    for (process, name), found in sorted(samples.items()):
        # The last rounds are excluded, because a finished run draws its figures.
        settled = [sample for sample in found if WARM_UP_SHARE * last <= sample.server_round < last]
        if len(settled) < 3:
            continue
        (rate, error), first, end = slope(settled, "megabytes"), settled[0], settled[-1]
        print(f"| {name} {process} | {first.megabytes:.1f} | {end.megabytes:.1f} | {rate:+.2f} ± {error:.2f} "
              f"| {first.files} | {end.files} |")  # fmt: skip


if __name__ == "__main__":
    main()
