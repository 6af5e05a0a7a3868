"""Draw the documentation's pictures from real runs: python docs/generate/pictures.py [home] [own] ..."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "generate")]

from blocks import blocks_of
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from contrafed.config.compose import compose_job
from contrafed.data.federation import load_federation
from contrafed.runs.output.figures import BLUE, GREEN, ORANGE, partition_figure
from contrafed.runs.setup import check_config

FIGURES = ROOT / "docs" / "figures"
PARTITIONS = {
    "iid": (), "dirichlet": (), "practical": (), "balanced_dirichlet": (), "pathological": (),
    "lognormal": ("partition.mean_size=70",), "sampled": ("partition.alpha=0.3",),
}  # fmt: skip
SPREAD = ("participation.mean_probability=0.3",)
PARTICIPATION = {
    "full": ("full",), "uniform": ("uniform", "participation.select=0.3"), "bernoulli": ("bernoulli", *SPREAD),
    "markovian": ("markovian", *SPREAD), "cyclic": ("cyclic", *SPREAD), "arrival": ("arrival",), "trace": ("trace",),
    "sine": ("sine", *SPREAD, "participation.period=24", "participation.amplitude=0.5", "participation.zones=4"),
    "separated": ("separated", *SPREAD), "round_robin": ("round_robin", "participation.active=8", "participation.step=5"),
    "loss": ("bernoulli", *SPREAD, "participation.loss_rate=0.3"),
}  # fmt: skip
CLIENTS, ROUNDS = 40, 300
METHODS = {"fedavg": ("FedAvg", ORANGE), "fedau": ("FedAU", GREEN), "pmfl": ("PMFL", BLUE)}


def class_counts(*overrides: str) -> np.ndarray:
    """Return training examples per client and class (K, C) of a configuration."""
    return load_federation(check_config(compose_job(list(overrides))).client).partition.class_counts()


def draw_partitions() -> None:
    """Draw the classes of each client, a picture for each partition."""
    for name, more in PARTITIONS.items():
        counts = class_counts(f"partition={name}", "num_clients=20", *more)
        partition_figure(FIGURES / f"partition_{name}.png", counts)


def draw_feature_shift() -> None:
    """Draw one digit as eight clients see it, a row for each kind of feature shift."""
    from contrafed.training.workspace import Workspace

    kinds = {"rotation": "degrees=90", "brightness": "strength=0.9", "blur": "strength=2", "noise": "strength=0.8"}
    figure: Any = Figure(figsize=(9, 4.2), dpi=130, layout="constrained")
    for axes, (kind, amount) in zip(figure.subplots(len(kinds), 8).tolist(), kinds.items(), strict=True):
        shift = (f"partition.feature_shift.kind={kind}", f"partition.feature_shift.{amount}")
        run = check_config(compose_job(["dataset=digits", "partition=iid", "num_clients=8", "model=mlp", *shift]))
        workspace = Workspace(run.client)
        for client, each in enumerate(axes):
            image = workspace.raw_images(torch.tensor([5 + (client + 1) * len(workspace.x)]))[0, ..., 0]
            each.imshow(image, cmap="gray", vmin=0, vmax=255)
            each.set(xticks=[], yticks=[], title=f"client {client}" if kind == "rotation" else "")
        axes[0].set_ylabel(kind)
    figure.savefig(FIGURES / "partition_feature_shift.png")


def draw_participation() -> None:
    """Draw the available clients and their rates, a picture for each pattern. The trace has five time zones."""
    with tempfile.TemporaryDirectory() as folder:
        day = Path(folder) / "day.csv"
        awake = [(client, r) for client in range(CLIENTS) for r in range(1, 25) if (r + client // 8) % 24 < 8]
        day.write_text("client,round,available\n" + "".join(f"{client},{r},1\n" for client, r in awake), encoding="utf-8")
        for name, (choice, *more) in PARTICIPATION.items():
            path = (f"participation.path={day}",) if choice == "trace" else ()
            draw_presence(name, f"participation={choice}", *more, *path)


def draw_presence(name: str, *overrides: str) -> None:
    """Draw clients by rounds, with lost replies in another colour, and each client's measured and expected rate."""
    from contrafed.data.participation import make_participation

    ready = check_config(compose_job(["strategy=fedavg", f"num_clients={CLIENTS}", *overrides]))
    partition = load_federation(ready.client).partition
    pattern = make_participation(ready.participation, partition.class_proportions, CLIENTS, ready.seed_of_federation)
    cells = np.zeros((CLIENTS, ROUNDS))
    for r in range(1, ROUNDS + 1):
        here = pattern.participants(r)
        cells[here, r - 1] = [2 if pattern.loses(r, client) else 1 for client in here.tolist()]
    counted, expected = (cells == 1).mean(1), pattern.probability()
    figure: Any = Figure(figsize=(8.4, 3.6), dpi=130, layout="constrained")
    raster, rates = figure.subplots(1, 2, sharey=True, width_ratios=(3.4, 1))
    shown = np.ma.masked_equal(cells, 0)
    extent = (0.5, ROUNDS + 0.5, CLIENTS - 0.5, -0.5)
    raster.imshow(
        shown, aspect="auto", cmap=ListedColormap([BLUE, ORANGE]), vmin=1, vmax=2, extent=extent, interpolation="nearest"
    )
    raster.set(xlabel="round" + (" (orange: the reply is lost)" if (cells == 2).any() else ""), ylabel="client")
    rates.barh(np.arange(CLIENTS), counted, height=0.8, color=BLUE, label=f"measured, mean {counted.mean():.3f}")
    if expected is not None:
        rates.plot(
            expected, np.arange(CLIENTS), "|", color=ORANGE, markersize=6, label=f"in the long run, {expected.mean():.3f}"
        )
    rates.set(xlabel="share of rounds that count", xlim=(0, 1.03))
    figure.legend(*rates.get_legend_handles_labels(), frameon=False, loc="outside upper right", ncols=2, fontsize=9)
    for axes in (raster, rates):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURES / f"participation_{name}.png")
    print(f"{name}: measured {counted.mean():.3f}", "" if expected is None else f"expected {expected.mean():.3f}")


def draw_home() -> None:
    """Draw the classes and participation of clients, and the accuracy of three methods."""
    import pandas as pd

    from contrafed.runs.run import run

    figure: Any = Figure(figsize=(11, 3.4), dpi=130, layout="constrained")
    holds, there, curves = figure.subplots(1, 3, width_ratios=(1, 1.5, 1.7))
    with tempfile.TemporaryDirectory() as folder:
        for name, (label, colour) in METHODS.items():
            summary = run(compose_job([f"strategy={name}", "participation=markovian", f"output_dir={folder}/{name}"]))
            log = pd.read_csv(Path(summary["folder"]) / "metrics.csv")
            shown = log[(log.scope == "global") & (log.split == "test") & (log.metric == "accuracy")]
            curves.plot(shown["round"], 100 * shown["value"], color=colour, label=label, linewidth=1.6)
        seen = pd.read_csv(Path(folder) / "pmfl" / "participants.csv")
    counts = class_counts("num_clients=50")
    holds.imshow(np.ma.masked_equal(counts, 0), aspect="auto", cmap="Blues", vmin=-10, interpolation="nearest")
    holds.set(title="digits of each client", xlabel="digit", ylabel="client")
    cells = np.zeros((len(counts), 300))
    cells[seen["client"], seen["round"] - 1] = 1
    there.imshow(cells, aspect="auto", cmap="Blues", vmax=1.2, interpolation="nearest", extent=(0.5, 300.5, 49.5, -0.5))
    there.set(title="participation", xlabel="round")
    curves.set(title="accuracy on test digits (%)", xlabel="round", xlim=(0, 300), ylim=(0, 100))
    curves.grid(axis="y", color="#dddddd", linewidth=0.6)
    curves.legend(frameon=False, loc="lower right")
    for axes in (holds, there, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURES / "home.png")


def draw_own() -> None:
    """Draw the plot of the tutorial by running its blocks."""
    with tempfile.TemporaryDirectory() as made:
        folder, env = Path(made), os.environ | {"PYTHONPATH": f"{made}/my_project"}
        for block in blocks_of(ROOT / "docs" / "own-method.md"):
            if block.title:
                (folder / "my_project" / block.title).write_text(block.text, encoding="utf-8")
            else:
                inside = folder if "mkdir -p my_project" in block.text else folder / "my_project"
                text = block.text.replace("contrafed -", f"{sys.executable} {ROOT / 'main.py'} -")
                subprocess.run(["bash", "-ec", text], cwd=inside, env=env, check=True)
            if (folder / "my_project" / "compare.png").exists():
                break
        shutil.copy(folder / "my_project" / "compare.png", FIGURES / "own_method.png")


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    draw = {
        "partitions": draw_partitions,
        "shift": draw_feature_shift,
        "participation": draw_participation,
        "home": draw_home,
        "own": draw_own,
    }
    for what in sys.argv[1:] or list(draw):
        draw[what]()
