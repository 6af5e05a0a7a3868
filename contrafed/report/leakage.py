"""Measure gradient leakage: what a server or an eavesdropper recovers of pictures from the gradients that clients upload.

    python -m contrafed.report.leakage dataset=cifar10
    python -m contrafed.report.leakage dataset=npz dataset.path=cifar10.npz --cases all_shared,hidden_last --images 10
    python -m contrafed.report.leakage dataset=cifar10 --methods fedavg,fedper,fedproto --images 2
    python -m contrafed.report.leakage dataset=cifar10 --cases figure10 --images 2

Attacks DLG's LeNet on the first training images of a data set (MpFedcon, Table 4 and Figure 10). Writes ``leakage.csv`` (a row
per image and case), ``leakage.md``, ``leakage.png`` and ``leakage.pdf`` to ``--out``. The error by step is in ``curves.csv``,
``curves.png`` and ``curves.pdf``.
"""

import argparse
import contextlib
import csv
import sys
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from contrafed.config.compose import compose_job
from contrafed.core import registry
from contrafed.core.arguments import Parser
from contrafed.core.client_run import choose
from contrafed.core.disk import replace
from contrafed.core.errors import UserError, unknown
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import Tensors
from contrafed.data.images import GENERATED_PATH, load_images
from contrafed.report.defences import CASES, GROUPS, LAYERS, Attempt, Case, Settings, attack_case, attempt, rows_of
from contrafed.report.gradient_capture import sent_by
from contrafed.report.inversion import sigmoid_lenet, weights_of
from contrafed.report.leakage_report import draw, draw_curves, markdown
from contrafed.runs.output import quiet_libraries, versions
from contrafed.runs.output.provenance import hardware

CSV, MARKDOWN, PICTURES, CURVES = "leakage.csv", "leakage.md", "pictures.npz", "curves.csv"

# Values that must be equal for all results of one folder.
COMMON_KEYS = ("dataset", "seed", "steps", "starts")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    try:
        options = parse(arguments)
        quiet_libraries(False)
        with quick_small_convolutions():
            run(options)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


@contextlib.contextmanager
def quick_small_convolutions() -> Iterator[None]:
    """Compute on one thread and without oneDNN. A distance on a 32x32 image takes 3.4 ms instead of 5.2."""
    threads, before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = before


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked command line. Raises ``UserError``."""
    parser = Parser("python -m contrafed.report.leakage", description=(__doc__ or "").split("\n", 1)[0])
    cases = ", ".join((*CASES, *GROUPS))
    parser.add_argument("overrides", nargs="*", default=[], help="the data set, as main.py takes it: dataset=cifar10")
    parser.add_argument("--cases", default=None, help=f"of {cases}; default: all, or none beside --methods")
    parser.add_argument("--methods", default="", help="attack what these methods' clients send; 'every' for all there are")
    parser.add_argument("--images", type=int, default=10, help="how many training images")
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="which is the first of them, so that processes can share the work, each with an --out",
    )
    parser.add_argument("--batch", type=int, default=1, help="images behind one gradient")
    parser.add_argument("--steps", type=int, default=100, help="of torch's L-BFGS, each of up to 20 iterations")
    parser.add_argument("--starts", type=int, default=3, help="of which the one with the nearest gradient counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("outputs/leakage"), help="folder; cases that it has are kept")
    options = parser.parse_args(arguments)
    for name in ("images", "batch", "steps", "starts"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} must be at least 1, got {getattr(options, name)}")
    for name in ("first", "seed"):
        if getattr(options, name) < 0:
            raise UserError(f"--{name} must be at least 0, got {getattr(options, name)}")
    options.methods = [name for name in options.methods.split(",") if name]
    known = registry.choices("strategy")
    if options.methods == ["every"]:
        options.methods = list(known)
    wanted = options.cases if options.cases is not None else "" if options.methods else "all"
    named = list(CASES) if wanted == "all" else [name for name in wanted.split(",") if name]
    options.cases = list(dict.fromkeys(case for name in named for case in GROUPS.get(name, [name])))
    for kind, names, choices in (("method", options.methods, known), ("case", options.cases, CASES)):
        for name in names:
            if name not in choices:
                raise unknown(kind, name, choices)
    if not options.methods and not options.cases:
        raise UserError(f"nothing to attack: --cases has none of {', '.join(CASES)}")
    if (file := next((part for part in (options.out, *options.out.parents) if part.is_file()), None)) is not None:
        raise UserError(f"--out={options.out}: {file} is a file, no folder")
    if options.images % options.batch:
        raise UserError(f"--images={options.images} must be whole batches of --batch={options.batch}")
    if options.batch > 1 and any(CASES[name].attack == "idlg" for name in options.cases):
        raise UserError("iDLG reads the label of one image: --batch 1, or other --cases")
    return options


def run(options: argparse.Namespace) -> None:
    """Attack one case after another. Results are written after each batch, and existing results of the folder are kept."""
    from contrafed.report.plots import save

    x, labels, classes, name = images_of(options)
    how = Settings(options.steps, options.starts, options.seed)
    about = {"batch": options.batch, "steps": how.steps, "starts": how.starts, "seed": how.seed, "dataset": name}
    about |= {"torch": versions()["torch"], "hardware": f"{hardware('cpu')}, one thread"}
    rows, pictures = read(options.out)
    curves = read_curves(options.out)
    for key in COMMON_KEYS:
        if other := {row[key] for row in rows} - {str(about[key])}:
            raise UserError(f"--out={options.out} has results of {key}={max(other)}, not {about[key]}: choose another folder")
    together = f"/batch{options.batch}" if options.batch > 1 else ""
    done = {(row["case"].partition("/")[0], int(row["image"]), int(row["batch"])) for row in rows}
    pictures |= {f"true/{options.first + k}": picture for k, picture in enumerate(x.numpy())}
    for case in (*options.cases, *(f"method:{method}" for method in options.methods)):
        for start in range(0, len(x), options.batch):
            first = options.first + start
            there = [(case, image, options.batch) in done for image in range(first, first + options.batch)]
            if all(there):
                continue
            if any(there):
                raise UserError(f"--out={options.out} has some of images {first} to {first + len(there) - 1} in other batches")
            part, truth = x[start : start + options.batch], labels[start : start + options.batch]
            for named, note, tried in tries(case, part, truth, classes, how, first):
                label = named + together
                found = [{"label": right} for right in truth] if tried is None else rows_of(tried, part, truth)
                rows += [{"case": label, "image": first + k, **row, "note": note, **about} for k, row in enumerate(found)]
                if tried is not None:
                    pictures |= {f"{label}/{first + k}": picture for k, picture in enumerate(tried.pictures)}
                    curves += curve_rows(label, first, tried)
                said = f"PSNR {found[0]['psnr']:.1f} dB, {tried.seconds:.0f} s" if tried else note
                print(f"{label}, image {first}: {said}", flush=True)
            write(options.out, rows, pictures, curves)
    (options.out / MARKDOWN).write_text(markdown(rows), encoding="utf-8")
    save(draw(pictures, rows), options.out / "leakage")
    if curves:
        save(draw_curves(curves), options.out / "curves")


def curve_rows(label: str, first: int, tried: Attempt) -> list[dict[str, Any]]:
    """Return a row for each image and step: its error on the attacker's way."""
    return [
        {"case": label, "image": first + k, "step": step, "mse": f"{error:.6g}"}
        for k, path in enumerate(tried.curve.T)
        for step, error in enumerate(path)
    ]


def tries(
    case: str, x: Tensor, labels: list[int], classes: int, how: Settings, number: int
) -> Iterator[tuple[str, str, Attempt | None]]:
    """Yield (name, note, result) of a case, or for ``method:NAME`` of what a method's client really uploads.

    The attacker draws its own weights for layers that stay on a client. In the first round the server knows them, because they
    are the initial model's. That case is ``NAME/round1``.
    """
    if case in CASES:
        yield case, "", attack_case(CASES[case], x, labels, classes, how, number)
        return
    model = sigmoid_lenet(x.shape[1], (x.shape[2], x.shape[3]), classes, how.seed)
    try:
        sent = sent_by(case.removeprefix("method:"), model, x, labels)
    except UserError as error:
        yield case, f"not measured: {error}", None
        return
    note = f"sends {sent.description}" + (f"; {sent.likeness(model, x, labels)}" if sent.gradient else "")
    if sent.classes is not None:
        note += "; class counts tell the labels"
    if not sent.gradient:
        yield case, f"{note}; no gradient to attack", None
        return
    stays = tuple(layer for layer, prefix in LAYERS.items() if not any(name.startswith(prefix) for name in sent.gradient))
    stays = tuple(layer for layer in stays if layer != "linear")
    for label, hidden in ((case, stays), *(((f"{case}/round1", ()),) if stays else ())):
        yield label, note, once(Case(hidden=hidden), model, sent.gradient, x, labels, how)


def once(case: Case, model: SplitModel, shared: Tensors, x: Tensor, labels: list[int], how: Settings) -> Attempt:
    """Attack a gradient, or return the earlier result for the same one. Most methods' first steps equal FedAvg's to the bit."""
    key = (case, how, *(value.numpy().tobytes() for value in (x, *shared.values())))
    if key not in _before:
        _before[key] = attempt(case, model, weights_of(model), shared, x, labels, how)
    return _before[key]


_before: dict[Any, Attempt] = {}


def images_of(options: argparse.Namespace) -> tuple[Tensor, list[int], int, str]:
    """Return the first training images (n, C, H, W) in [0, 1], their labels, the number of classes, and the data set's name."""
    composed = compose_job(list(options.overrides))
    values: Any = OmegaConf.to_container(composed, resolve=True)
    choice = choose("dataset", values["dataset"])
    data = load_images(choice)
    if data.kind != "image":
        raise UserError(f"dataset={choice.name}: leakage is of images, and an example of these data is {data.inputs}")
    training = torch.nonzero(~data.held_out).flatten()
    index = training[options.first :][: options.images]
    if not len(index):
        raise UserError(f"--first={options.first} leaves none of the {len(training)} training images of dataset={choice.name}")
    name = choice.name if choice.values.get("path") in (None, GENERATED_PATH) else Path(str(choice.values["path"])).stem
    return data.x[index].contiguous().float() / 255, data.y[index].tolist(), data.num_classes, name


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Return the rows and pictures in a folder. Raises ``UserError`` for a damaged one."""
    if not (folder / CSV).exists():
        return [], {}
    try:
        with (folder / CSV).open(encoding="utf-8", newline="") as file, np.load(folder / PICTURES) as pictures:
            rows, found = list(csv.DictReader(file)), dict(pictures)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        what = f"--out={folder} has results, but not all of them can be read"
        raise UserError(f"{what} ({' '.join(str(error).split())}): choose another folder") from error
    if absent := [key for key in ("case", "image", "batch", *COMMON_KEYS) if any(row.get(key) is None for row in rows)]:
        raise UserError(f"--out={folder}: {CSV} has rows without '{absent[0]}': choose another folder")
    return rows, found


def read_curves(folder: Path) -> list[dict[str, Any]]:
    """Return the errors by step in a folder, none in one from before there were any. Raises ``UserError``."""
    if not (folder / CURVES).exists():
        return []
    with (folder / CURVES).open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    if any(row.get(key) in (None, "") for row in found for key in ("case", "image", "step", "mse")):
        raise UserError(f"--out={folder}: {CURVES} has rows without a case, image, step or mse: choose another folder")
    return found


def write(folder: Path, rows: list[dict[str, Any]], pictures: dict[str, np.ndarray], curves: list[dict[str, Any]]) -> None:
    """Write the results so far in whole files, the table last, so that every row has its picture after any interruption."""
    folder.mkdir(parents=True, exist_ok=True)
    images = folder / f"part-{PICTURES}"
    np.savez_compressed(images, **pictures)  # type: ignore[arg-type]
    replace(images, folder / PICTURES)
    for name, lines in ((CURVES, curves), (CSV, rows)):
        if lines:
            with (folder / f"{name}.part").open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, max(lines, key=len), restval="")
                writer.writeheader()
                writer.writerows(lines)
            replace(folder / f"{name}.part", folder / name)


if __name__ == "__main__":
    sys.exit(main())
