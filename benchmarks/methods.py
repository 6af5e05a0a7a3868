"""Compare every method with the same settings: the time of a round relative to FedAvg's, and the table of docs/METHODS.md.

    python benchmarks/methods.py seconds     run each method in turns with FedAvg, into results/methods/seconds.csv
    python benchmarks/methods.py table       write the table from that and results/digits.csv

The settings are ``experiment=digits`` with ``participation=uniform``, and accuracies come from its sweep. Time is the process's
own (CPU seconds on one core), so that other work on the machine has little effect.
"""

import csv
import math
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SECONDS = ROOT / "results" / "methods" / "seconds.csv"
PATTERNS = ("uniform", "bernoulli", "markovian")
# Personal: each client's personal model, or the global one, on the client's test part.
GLOBAL, PERSONAL = ("accuracy_final",), ("personal_accuracy_mean", "clients_accuracy_mean")
BEGIN, END = "<!-- begin: every method on the digits -->", "<!-- end: every method on the digits -->"


def seconds(rounds: int = 16, pairs: int = 3) -> None:
    """Write the CPU seconds per round of each method, and of FedAvg in turns with it."""
    from contrafed.core import registry

    SECONDS.parent.mkdir(exist_ok=True)
    with SECONDS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["strategy", "seconds", "fedavg_seconds", "ratio", "rounds", "pairs"])
        for name in registry.choices("strategy"):
            turns = [(_seconds_a_round("fedavg", rounds), _seconds_a_round(name, rounds)) for _ in range(pairs)]
            plain, own = (statistics.median(times) for times in zip(*turns, strict=True))
            ratio = statistics.median(second / first for first, second in turns)
            writer.writerow([name, f"{own:.4f}", f"{plain:.4f}", f"{ratio:.2f}", rounds, pairs])
            file.flush()


def _seconds_a_round(name: str, rounds: int) -> float:
    """Return the median CPU seconds of the rounds after the first, without evaluation."""
    from contrafed import compose, run

    clock = list[float]()
    with tempfile.TemporaryDirectory() as folder:
        size = ("participation=uniform", f"num_rounds={rounds}", f"eval_every={rounds}", "eval_clients=false")
        wanted = compose("experiment=digits", f"strategy={name}", *size, "engine=local", f"output_dir={folder}/run")
        sys.stdout, kept = sys.stderr, sys.stdout
        try:
            run(wanted, on_round=lambda server_round, values: clock.append(time.process_time()))
        finally:
            sys.stdout = kept
    return statistics.median(after - before for before, after in pairwise(clock[1:-1]))


def table() -> None:
    """Write the table of docs/METHODS.md between its two marks."""
    page = ROOT / "docs" / "METHODS.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n{chr(10).join(build_table())}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


def build_table() -> list[str]:
    """Return the lines of the table."""
    from contrafed.core import registry
    from contrafed.report import results

    digits = results.load(ROOT / "results" / "digits.csv")
    with (ROOT / "results" / "digits.csv").open(encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    with SECONDS.open(encoding="utf-8") as file:
        ratios = {row["strategy"]: row["ratio"] for row in csv.DictReader(file)}
    lines = [
        f"| method | {' | '.join(f'{kind}, {p}' for kind in ('global', 'clients') for p in PATTERNS)} | time | KiB |",
        f"| --- |{' ---: |' * 8}",
    ]
    for name in registry.choices("strategy"):
        if not (mine := [row for row in runs if row["method"] == name]):
            continue
        scores = [_score(mine, columns, pattern) for columns in (GLOBAL, PERSONAL) for pattern in PATTERNS]
        kib = _kib([run for run in digits if run.method == name])
        lines.append(f"| `{name}` | {' | '.join(scores)} | {ratios[name]} | {kib} |")
    return lines


def _score(runs: list[dict[str, str]], columns: tuple[str, ...], pattern: str) -> str:
    """Return the mean over the seeds, in %, of the first of the columns that the method has. Empty without one."""
    mine = [row for row in runs if row["participation"] == pattern]
    values = [float(next(filter(None, map(row.get, columns)), "nan")) for row in mine]  # type: ignore[arg-type]
    return f"{100 * statistics.mean(values):.1f}" if values and not math.isnan(values[0]) else ""


def _kib(runs: list[Any]) -> str:
    """Return what a client receives and uploads in a round, in KiB."""
    down, up = (statistics.mean(run.number(f"bytes_{way}_per_client") for run in runs) for way in ("down", "up"))
    return f"{down / 1024:.0f} + {up / 1024:.0f}"


if __name__ == "__main__":
    {"seconds": seconds, "table": table}[sys.argv[1]]()
