"""Measure accuracy under attackers: ``python benchmarks/attacks.py results/robustness/attacks.csv`` adds missing rows.

FedAvg trains on digits with the settings of ``experiment=digits``, on 20 clients of a small network, so that a run takes
seconds. Every attack and share of attackers is combined with every aggregation. ``--table`` prints the file as the table of
docs/RELIABILITY.md.
"""

import argparse
import csv
import itertools
import tempfile
from pathlib import Path

ATTACKS = ("sign_flip", "scale", "noise", "label_flip", "alie", "ipm")
SHARES = (0.1, 0.2, 0.3)
AGGREGATIONS = ("mean", "median", "multi_krum", "geometric_median", "norm_clip", "trimmed_mean", "krum")
TRAINING = (
    "experiment=digits", "strategy=fedavg", "participation=full", "partition.alpha=1", "num_clients=20", "num_rounds=40",
    "model=mlp", "model.hidden=[32]", "eval_clients=false", "eval_every=40",
    "engine=local", "engine.stack_size=20", "tracker=none",
)  # fmt: skip
COLUMNS = ("aggregation", "attack", "share", "seed", "accuracy")


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    rows = read(options.file)
    if options.table:
        print(table(rows))
        return
    cells = [("none", 0.0), *itertools.product(ATTACKS, SHARES)]
    for seed, aggregation, (attack, share) in itertools.product(range(options.seeds), AGGREGATIONS, cells):
        key = (aggregation, attack, str(share), str(seed))
        if key not in {row[:4] for row in rows}:
            rows.append((*key, f"{accuracy(aggregation, attack, share, seed):.4f}"))
            with options.file.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


def read(path: Path) -> list[tuple[str, ...]]:
    """Return the rows of the file, none if there is no file yet."""
    return [tuple(row) for row in list(csv.reader(path.open()))[1:]] if path.exists() else []


def accuracy(aggregation: str, attack: str, share: float, seed: int) -> float:
    """Return the final accuracy of one run."""
    from contrafed import compose, run

    attacked = (f"attack={attack}", f"attack.fraction={share}") if share else ()
    with tempfile.TemporaryDirectory() as folder:
        cfg = compose(*TRAINING, *attacked, f"aggregation={aggregation}", f"seed={seed}", f"output_dir={folder}/run")
        return float(run(cfg)["accuracy_final"])


def table(rows: list[tuple[str, ...]]) -> str:
    """Return a table with a row for each attack and share of attackers, and columns of aggregations.

    A cell has the mean over seeds in per cent. The last rows have the worst attack for each share.
    """
    found: dict[tuple[str, str, float], float] = {}
    for name, (attack, share) in itertools.product(AGGREGATIONS, [("none", 0.0), *itertools.product(ATTACKS, SHARES)]):
        values = [float(row[4]) for row in rows if row[:3] == (name, attack, str(share))]
        if values:
            found[name, attack, share] = 100 * sum(values) / len(values)
    for name, share in itertools.product(AGGREGATIONS, SHARES):
        each = [found[name, attack, share] for attack in ATTACKS if (name, attack, share) in found]
        if len(each) == len(ATTACKS):
            found[name, "the worst", share] = min(each)
    lines = [f"| attack | attackers (%) | {' | '.join(f'`{name}`' for name in AGGREGATIONS)} |"]
    lines.append(f"| --- | --: {'| --: ' * len(AGGREGATIONS)}|")
    for attack, share in [("none", 0.0), *itertools.product((*ATTACKS, "the worst"), SHARES)]:
        cells = [f"{found[name, attack, share]:.1f}" if (name, attack, share) in found else "" for name in AGGREGATIONS]
        label = f"`{attack}`" if attack in ATTACKS else attack
        lines.append(f"| {label} | {100 * share:.0f} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
