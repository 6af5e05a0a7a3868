"""Say what was loaded, and find images and labels that cannot be what was meant. Every source of data comes through here."""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from contrafed.core.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SAMPLED_IMAGES = 2000  # images that are compared with each other
MAX_SAMPLED_NUMBERS, MIN_SAMPLED_ROWS = 2**22, 20  # of values whose columns are looked at
MIN_GREY_LEVELS = 3  # images that differ by less in every pixel are the same to a reader
MAX_SAME = 0.5  # share of equal images above which a run warns
MAX_NAMED_CLASSES = 5
MAX_COMPARED_IMAGES = 200_000  # above, a search for copies takes seconds
MAX_COPIES = 0.01  # share of images with a copy elsewhere above which a run warns
MAX_OUTLIER = 1e4  # distance of a value from the median of its column, in widths of the middle nine tenths
MAX_CHANNELS_PER_STEP = 4  # of signals. With more the axes may be swapped
ORIENTATION_TAG = 0x0112  # of Exif


@dataclass(frozen=True)
class Loaded:
    """What a loader saw besides the images that it returns."""

    class_names: tuple[str, ...] = ()
    skipped: Counter[str] = field(default_factory=Counter)  # file ending -> number of files that are no images
    converted: Counter[str] = field(default_factory=Counter)  # what was done -> number of images
    notes: tuple[str, ...] = ()  # about what was left out


def convert_image(image: "Image", mode: str, converted: Counter[str]) -> "Image":
    """Return an image in ``mode`` as a viewer shows it: turned by its orientation flag, and transparency on white.

    Args:
        image: A Pillow image.
        mode: ``L`` or ``RGB``.
        converted: Counts what was done.
    """
    from PIL import Image, ImageOps

    if getattr(image, "n_frames", 1) > 1:
        converted["only the first of several frames"] += 1
    if image.getexif().get(ORIENTATION_TAG, 1) in range(2, 9):
        image = ImageOps.exif_transpose(image)
        converted["turned by their orientation flag"] += 1
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        opacity: Any = image.getchannel("A").getextrema()
        if opacity[0] < 255:
            converted["transparency on white"] += 1
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB").convert(mode)


def check_loaded(data: Any, where: str) -> list[str]:
    """Return warnings about images and labels, each with its fix.

    Args:
        data: What was loaded (``ImageData``), with the test split that the run uses.
        where: The source, for messages.

    Raises:
        UserError: If all images are the same, if pixels are only 0 and 1, or if the test split alone has a class.
    """
    if not len(data.y):
        return []
    low, high = map(float, data.x.aminmax())
    if data.kind == "image" and low < high <= 1:
        raise UserError(
            f"{where}: all pixels are 0 or 1 of 255, as if scaled twice. Fix: give uint8 in 0..255 or floats in 0..1"
        )
    lines = [*data.loaded.notes, _check_names(data.loaded.class_names, where), _check_same(data, where)]
    if not lines[-1] and data.kind == "image":
        lines += _check_copies(data, where)
    elif not lines[-1] and data.kind == "values":
        lines += _check_values(data, where)
    counts = count_classes(data)
    missing, trains, tests = np.sum(list(counts.values()), axis=0) == 0, counts["train"] > 0, counts["test"] > 0
    for split, found in counts.items():
        if (alone := (found > 0) & ~trains).any():
            raise UserError(
                f"{where}: {name_classes(data, alone)} in the {split} split alone, where nobody can learn it. "
                "Fix: add training images, or set dataset.merge_splits=true"
            )
    if tests.any() and (only := trains & ~tests).any():
        lines.append(f"{where}: {name_classes(data, only)} in the training split alone, so that no score knows it")
    if missing.any():
        lines.append(f"{where}: {name_classes(data, missing)} without images")
    return [line for line in lines if line]


def count_classes(data: Any) -> dict[str, np.ndarray]:
    """Return the images of each class (C,) in the splits ``train``, ``test`` and, if there is one, ``validation``."""
    splits = {"train": ~data.held_out, "test": data.test}
    splits |= {} if data.validation is None else {"validation": data.validation}
    return {name: np.bincount(data.y[marks], minlength=data.num_classes) for name, marks in splits.items()}


def _check_names(names: Sequence[str], where: str) -> str:
    """Return a warning if names of classes differ only in case or blanks."""
    alike = Counter(folded := ["".join(name.split()).casefold() for name in names])
    twice = [name for name, key in zip(names, folded, strict=True) if alike[key] > 1]
    return f"{where}: classes {', '.join(twice)} have almost the same name. Fix: make them one class" if twice else ""


def _check_same(data: Any, where: str) -> str:
    """Return a warning if most images are the same. Raises ``UserError`` if all are, up to a grey level or two."""
    picked = torch.linspace(0, len(data.y) - 1, min(len(data.y), MAX_SAMPLED_IMAGES)).long()
    sample = data.x[picked].flatten(1)
    spread = float((sample.amax(0).double() - sample.amin(0).double()).max())
    what = "images" if data.kind == "image" else "examples"
    fix = "Fix: look at a few of them. A drawing may be in a channel that is not read, such as transparency"
    if data.kind != "image":
        fix = "Fix: look at a few of them"
        if len(sample) > 1 and not spread:
            raise UserError(f"{where}: all {len(data.y)} examples are the same. {fix}")
    elif len(sample) > 1 and spread < MIN_GREY_LEVELS:
        raise UserError(f"{where}: all {len(data.y)} images are the same, up to {spread:.0f} of 255 grey levels. {fix}")
    most = Counter(row.tobytes() for row in sample.numpy()).most_common(1)[0][1]
    return (
        f"{where}: {most / len(sample):.0%} of the {what} are one and the same. {fix}" if most > MAX_SAME * len(sample) else ""
    )


def _check_copies(data: Any, where: str) -> list[str]:
    """Return warnings about images that occur with two labels, and about held-out images that are training images too."""
    if len(data.y) > MAX_COMPARED_IMAGES:
        return []
    rows = data.x.permute(0, 2, 3, 1).flatten(1).numpy()
    held, labels = data.held_out.tolist(), data.y.tolist()
    digests = [zlib.crc32(row) for row in rows]  # a few equal ones of other images are far below the share
    of_label: dict[int, set[int]] = {}
    for digest, label in zip(digests, labels, strict=True):
        of_label.setdefault(digest, set()).add(label)
    trained = {digest for digest, out in zip(digests, held, strict=True) if not out}
    twice = sum(len(of_label[digest]) > 1 for digest in digests)
    seen = sum(out and digest in trained for digest, out in zip(digests, held, strict=True))
    lines = []
    if twice > MAX_COPIES * len(labels):
        lines.append(f"{where}: {twice} images occur with two labels or more. Fix: keep each in one class")
    if seen > MAX_COPIES * max(sum(held), 1):
        said = f"{seen} of {sum(held)} images for testing or validation are training images too, so that scores are too high"
        lines.append(f"{where}: {said}. Fix: keep each in one split")
    return lines


def _check_values(data: Any, where: str) -> list[str]:
    """Return warnings about a value far from all others of its column, and about signals whose axes may be swapped."""
    x, lines = data.x, []
    rows = max(MIN_SAMPLED_ROWS, min(len(x), MAX_SAMPLED_IMAGES, MAX_SAMPLED_NUMBERS // x[0].numel()))
    sample = x[torch.linspace(0, len(x) - 1, rows).long()].flatten(1).numpy()
    low, middle, high = (torch.from_numpy(row).double() for row in np.quantile(sample, (0.05, 0.5, 0.95), axis=0))
    ends = torch.stack(x.flatten(1).aminmax(dim=0)).double()
    far = ((ends - middle).abs() > MAX_OUTLIER * (high - low)) & (high > low)
    if far.any():
        column = int(far.any(0).nonzero()[0])
        value = float(ends[:, column][far[:, column]][0])
        said = f"a value of column {column} is {value:.3g}, and most are between {low[column]:.3g} and {high[column]:.3g}"
        lines.append(f"{where}: {said}. Fix: leave it out, if it stands for a missing one")
    if x.dim() == 3 and x.shape[1] > MAX_CHANNELS_PER_STEP * x.shape[2]:
        channels, steps = x.shape[1:]
        fix = f"Fix: x.transpose(0, 2, 1), if there are {steps} signals of {channels} steps"
        lines.append(f"{where}: each example has {channels} signals of {steps} steps. {fix}")
    return lines


def name_classes(data: Any, chosen: np.ndarray, verbs: tuple[str, str] = ("is", "are")) -> str:
    """Return "class cat is" or "classes 3, 7 are", at most a few. ``chosen`` marks the classes (C,)."""
    names, labels = data.loaded.class_names, np.flatnonzero(chosen).tolist()
    told = ", ".join(str(names[label] if label < len(names) else label) for label in labels[:MAX_NAMED_CLASSES])
    more = ", ..." if len(labels) > MAX_NAMED_CLASSES else ""
    return f"class {told} {verbs[0]}" if len(labels) == 1 else f"classes {told}{more} {verbs[1]}"


def describe_loaded(data: Any) -> str:
    """Return one line: ``240 images 28x28x1, 2 classes (cat, dog), 180 train, 60 test; 90 files skipped: .gif``."""
    names = data.loaded.class_names
    told = f" ({', '.join(names)})" if 0 < len(names) <= MAX_NAMED_CLASSES else ""
    line = f"{len(data.y)} {_describe_examples(data)}, {data.num_classes} classes{told}"
    line += "".join(f", {counts.sum()} {split}" for split, counts in count_classes(data).items())
    if skipped := data.loaded.skipped:
        line += f"; {skipped.total()} files skipped: {', '.join(sorted(skipped))}"
    return line + "".join(f"; {count} with {what}" for what, count in sorted(data.loaded.converted.items()))


def _describe_examples(data: Any) -> str:
    """Return "images 28x28x1", "examples of 9x128 numbers" or "examples of 20 tokens (of 5000)"."""
    if data.kind == "image":
        channels, height, width = data.x.shape[1:]
        return f"images {height}x{width}x{channels}"
    return f"examples of {data.inputs}" + (f" (of {data.inputs.num_tokens})" if data.kind == "tokens" else "")


def about_loaded(data: Any, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the full account for ``summary.json``: sizes, classes with their counts, and what was skipped or converted."""
    loaded = data.loaded
    return {
        "images" if data.kind == "image" else "examples": len(data.y),
        "shape": [*data.x.shape[2:], data.x.shape[1]] if data.kind == "image" else list(data.x.shape[1:]),
        "classes": list(loaded.class_names) or data.num_classes,
        **{f"{split}_by_class": counts.tolist() for split, counts in count_classes(data).items()},
        **{n: dict(v) for n in ("skipped", "converted") if (v := getattr(loaded, n))},
        **({"warnings": list(warnings)} if warnings else {}),
    }
