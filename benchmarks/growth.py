"""Measure how a run grows: clients 10^2 to 10^6, participants 10 to 10,000, rounds to 100,000. FedAvg on a tiny model.

    python benchmarks/growth.py                                # ours, on engine=local and engine=ray
    python benchmarks/growth.py --parts participants --repeats 1 --engines local

Each cell is one process. Cells take turns, and values are medians. ``CPU`` is a round's CPU time in the process. ``MiB`` is the
largest proportional size in memory of the process and of all that it started.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from run import images

# part: (clients, participants, rounds). A round has one step of 32 examples.
PARTS = {
    "clients": [(10**power, 10, 20) for power in range(2, 7)],
    "participants": [(20_000, count, 6) for count in (10, 100, 1_000, 10_000)],
    "rounds": [(100, 10, count) for count in (100, 1_000, 10_000)],
    "largest": [(200_000, 100_000, 2)],
}
COMMON = (
    "dataset=npz", "model=mlp", "model.hidden=[16]", "partition=sampled", "partition.examples_per_client=160",
    "eval_every=1000000", "strategy=fedavg", "strategy.local.iterations=1", "strategy.local.batch_size=32", "tracker=none",
    "strategy.local.lr=0.01", "participation=uniform",
)  # fmt: skip


def sum_memory(root: int) -> float:
    """Return the proportional memory of a process and its descendants, MiB."""
    parents = {}
    for entry in Path("/proc").iterdir():
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (ValueError, OSError):
            continue
    found = {root}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    total = 0
    for process in found:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def cell(engine: str, clients: int, participants: int, rounds: int, folder: Path) -> dict[str, float]:
    """Run one setting in this process."""
    from contrafed import compose, run

    began, cpu, peak, done = time.perf_counter(), [], [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            peak[0] = max(peak[0], sum_memory(os.getpid()))

    threading.Thread(target=watch, daemon=True).start()
    sizes = (f"num_clients={clients}", f"participation.select={participants}", f"num_rounds={rounds}", f"engine={engine}")
    where = (f"dataset.path={folder / 'images.npz'}", f"output_dir={folder / str(os.getpid())}")
    started: list[float] = []

    def on_round(server_round: int, values: dict[str, float]) -> None:
        started.append(time.perf_counter() - began)
        cpu.append(time.process_time())

    summary = run(compose(*COMMON, *sizes, *where), on_round=on_round)
    done.set()
    rows = (Path(summary["folder"]) / "times.csv").read_text().splitlines()[2:]
    seconds = [float(row.split(",")[1]) for row in rows]
    each = statistics.median(b - a for a, b in itertools.pairwise(cpu[1:])) if len(cpu) > 2 else 0.0
    return {
        "start": started[0],
        "seconds": statistics.median(seconds),
        "cpu": each,
        "MiB": max(peak[0], sum_memory(os.getpid())),
    }


def main() -> None:
    """Measure every cell in turn, repeatedly, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engines", nargs="+", default=["local", "ray"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        engine, *sizes, folder = options.cell
        sys.stdout, out = sys.stderr, sys.stdout  # a run prints its own progress
        print(json.dumps(cell(engine, *map(int, sizes), Path(folder))), file=out)
        return
    found: dict[tuple[str, ...], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        images(Path(folder) / "images.npz")
        for _ in range(options.repeats):
            for part in options.parts:
                for sizes in PARTS[part]:
                    for engine in options.engines:
                        key = (part, *map(str, sizes), engine)
                        command = [sys.executable, __file__, "--cell", engine, *key[1:4], folder]
                        done = subprocess.run(command, capture_output=True, text=True)
                        if done.returncode == 0:
                            found.setdefault(key, []).append(json.loads(done.stdout.splitlines()[-1]))
                        else:
                            print(f"{key} failed: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    print("| part | clients | participants | rounds | engine | start-up, s | s / round | CPU s / round | MiB |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for key, rows in found.items():
        start, seconds, cpu, memory = (
            statistics.median(row[name] for row in rows) for name in ("start", "seconds", "cpu", "MiB")
        )
        print(f"| {' | '.join(key)} | {start:.1f} | {seconds:.4f} | {cpu:.4f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
