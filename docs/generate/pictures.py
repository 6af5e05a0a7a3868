"""The documentation's pictures, drawn by the code that runs use: python docs/generate/pictures.py [home] [partitions] [own]."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "generate")]

from blocks import blocks_of
from matplotlib.figure import Figure

from contrafed.composition import compose_job
from contrafed.reporting.figures import BLUE, GREEN, ORANGE, partition_figure
from contrafed.settings import resolve
from partitions.federation import load_federation

FIGURES = ROOT / "docs" / "figures"
PARTITIONS = {
    "iid": (), "dirichlet": (), "practical": (), "balanced_dirichlet": (), "pathological": (),
    "lognormal": ("partition.mean_size=70",), "sampled": ("partition.alpha=0.3",),
}  # fmt: skip
METHODS = {"fedavg": ("FedAvg", ORANGE), "fedau": ("FedAU", GREEN), "pmfl": ("PMFL", BLUE)}


def class_counts(*overrides: str) -> np.ndarray:
    """Return training examples per node and class (K, C) of a configuration."""
    from omegaconf import OmegaConf

    ready = resolve(OmegaConf.to_container(compose_job(list(overrides)), resolve=True))  # type: ignore[arg-type]
    partition = load_federation(ready.node).partition
    y = load_federation(ready.node).data.y.numpy()
    nodes = range(partition.num_nodes)
    return np.array([np.bincount(y[partition.train(node)], minlength=partition.num_classes) for node in nodes])


def draw_partitions() -> None:
    """Draw who holds what, a picture for each way of dealing out."""
    for name, more in PARTITIONS.items():
        counts = class_counts(f"partition={name}", "num_nodes=20", *more)
        partition_figure(FIGURES / f"partition_{name}.png", counts)


def draw_home() -> None:
    """Draw who holds what, who is there, and what three methods make of it."""
    import pandas as pd

    from contrafed.experiment import run

    figure: Any = Figure(figsize=(11, 3.4), dpi=130, layout="constrained")
    holds, there, curves = figure.subplots(1, 3, width_ratios=(1, 1.5, 1.7))
    with tempfile.TemporaryDirectory() as folder:
        for name, (label, colour) in METHODS.items():
            summary = run(compose_job([f"strategy={name}", "participation=markovian", f"output_dir={folder}/{name}"]))
            log = pd.read_csv(Path(summary["folder"]) / "metrics.csv")
            shown = log[(log.scope == "global") & (log.split == "test") & (log.metric == "accuracy")]
            curves.plot(shown["round"], 100 * shown["value"], color=colour, label=label, linewidth=1.6)
        seen = pd.read_csv(Path(folder) / "pmfl" / "participants.csv")
    counts = class_counts("num_nodes=50")
    holds.imshow(np.ma.masked_equal(counts, 0), aspect="auto", cmap="Blues", vmin=-10, interpolation="nearest")
    holds.set(title="who holds what", xlabel="digit", ylabel="node")
    cells = np.zeros((len(counts), 300))
    cells[seen["node"], seen["round"] - 1] = 1
    there.imshow(cells, aspect="auto", cmap="Blues", vmax=1.2, interpolation="nearest", extent=(0.5, 300.5, 49.5, -0.5))
    there.set(title="who shows up", xlabel="round")
    curves.set(title="accuracy on test digits (%)", xlabel="round", xlim=(0, 300), ylim=(0, 100))
    curves.grid(axis="y", color="#dddddd", linewidth=0.6)
    curves.legend(frameon=False, loc="lower right")
    for axes in (holds, there, curves):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURES / "home.png")


def draw_own() -> None:
    """Do what the tutorial says, up to its plot."""
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
    for what in sys.argv[1:] or ["partitions", "home", "own"]:
        {"partitions": draw_partitions, "home": draw_home, "own": draw_own}[what]()
