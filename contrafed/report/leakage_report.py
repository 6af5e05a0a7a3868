"""Write the results of a measurement of gradient leakage: the columns of Table 4, and all pictures in a figure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# MpFedcon's Table 4 marks a case as defended. Here it is defended if the median of the best start's error is at least this.
DEFENDED, CLEAR = 0.01, 20.0


def summary(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per case, in order: medians over its images, and how many are clear (over 20 dB)."""
    cases: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cases.setdefault(str(row["case"]), []).append(row)
    found = []
    for case, some in cases.items():
        tried = [row for row in some if row.get("psnr") not in (None, "")]
        line: dict[str, Any] = {"case": case, "images": len(some), "note": some[0].get("note", "")}
        if tried:
            columns = {
                key: np.array([float(row[key]) for row in tried]) for key in ("psnr", "ssim", "best_mse", "constant_psnr")
            }
            line |= {key: float(np.median(values)) for key, values in columns.items()}
            line["clear"] = int((columns["psnr"] > CLEAR).sum())
            line["labels"] = sum(int(row["label"]) == int(row["label_found"]) for row in tried)
            line["defended"] = line["best_mse"] >= DEFENDED
        found.append(line)
    return found


def markdown(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the table with a row per case."""
    lines = [
        "| case | median PSNR (dB) | of one colour | over 20 dB | median SSIM | labels right | defended | |",
        "| --- | ---: | ---: | ---: | ---: | ---: | :---: | --- |",
    ]
    for line in summary(rows):
        n = line["images"]
        cells = ["-"] * 6
        if "psnr" in line:
            cells = [f"{line['psnr']:.1f}", f"{line['constant_psnr']:.1f}", f"{line['clear']} of {n}", f"{line['ssim']:.2f}"]
            cells += [f"{line['labels']} of {n}", "yes" if line["defended"] else "no"]
        lines.append(f"| {line['case']} | {' | '.join(cells)} | {line['note']} |")
    return "\n".join(lines) + "\n"


def draw(pictures: Mapping[str, np.ndarray], rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Return a figure of the pictures: a row per case below the true ones, a column per image, with PSNR above each."""
    from matplotlib.figure import Figure

    psnr = {f"{row['case']}/{row['image']}": float(row["psnr"]) for row in rows if row.get("psnr") not in (None, "")}
    columns = sorted({int(name.rpartition("/")[2]) for name in pictures})
    cases = ["true", *dict.fromkeys(str(row["case"]) for row in rows if f"{row['case']}/{row['image']}" in pictures)]
    figure = Figure(figsize=(2.2 + 0.72 * len(columns), 0.4 + 0.86 * len(cases)), dpi=130, layout="constrained")
    grid = figure.subplots(len(cases), len(columns), squeeze=False)
    for case, line in zip(cases, grid, strict=True):
        for image, axes in zip(columns, line, strict=True):
            axes.set_axis_off()
            name = f"{case}/{image}"
            if name in pictures:
                shown = np.moveaxis(pictures[name], 0, -1)
                axes.imshow(shown if shown.shape[-1] == 3 else shown[..., 0], cmap="gray", vmin=0, vmax=1)
            if name in psnr:
                axes.set_title(f"{psnr[name]:.1f} dB", fontsize=6, pad=1.5)
        line[0].text(-0.15, 0.5, case, transform=line[0].transAxes, ha="right", va="center", fontsize=7)
    return figure


def draw_curves(curves: Iterable[Mapping[str, Any]]) -> "Figure":
    """Return a figure of the median error over images by step, with a line for each case (MpFedcon, Figure 10).

    Args:
        curves: Rows with ``case``, ``image``, ``step`` and ``mse``. An attack that ended early keeps its last error.
    """
    from matplotlib.figure import Figure

    paths: dict[str, dict[str, dict[int, float]]] = {}
    for row in curves:
        paths.setdefault(str(row["case"]), {}).setdefault(str(row["image"]), {})[int(row["step"])] = float(row["mse"])
    last = max((step for some in paths.values() for path in some.values() for step in path), default=0)
    figure = Figure(figsize=(6.4, 4), dpi=130, layout="constrained")
    axes = figure.subplots()
    for case, some in paths.items():
        errors = [[path[min(step, max(path))] for step in range(last + 1)] for path in some.values()]
        axes.plot(np.median(errors, axis=0), label=case)
    axes.axhline(DEFENDED, color="0.7", linewidth=0.8, linestyle="--")
    axes.set(yscale="log", xlabel="step of the attack", ylabel="mean squared error of the image")
    axes.legend(fontsize=7)
    return figure
