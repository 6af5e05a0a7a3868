"""How each method looks in every figure: one colour, line style, marker and hatch, also for colour-blind readers."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contrafed.runs.output.figures import BLUE, GREEN, ORANGE

# Okabe and Ito's colours without their yellow, which is too pale for a line on white, and a brown in its place; each with its
# methods, one a row of ROWS. Methods of one paper's tables share a colour as rarely as eight colours allow.
COLOURS = {
    BLUE: ("pmfl", "ditto", "fedproto", "feddecorr", "fedadam"),
    ORANGE: ("fedrcl", "mifa", "lgfedavg", "fedgh", "apfl", "fedavg_ft"),
    GREEN: ("fedcrl", "fedrep", "fedhyper", "fedcosr", "fedscl", "fedmlb"),
    "#CC79A7": ("mpfedcon", "fedvarp", "fedpac", "fedamp", "fedntd", "fednova"),
    "#56B4E9": ("moon", "perfedavg", "scaffold", "fedavgm", "fedproc"),
    "#E69F00": ("fedprox", "pfedme", "fedppo", "fedexp", "fedawe"),
    "#000000": ("fedavg", "fedper", "feddyn", "fedlc", "fedbabu"),
    "#7F5539": ("fedau", "local", "fedala", "fedagm", "fedcl", "fedavg_fitnet"),
}
# Of ten classes: with two of Paul Tol's colours, which protanopes and deuteranopes see apart from these.
CLASSES = (*COLOURS, "#332288", "#DDCC77")
# Line style, marker, hatch.
ROWS: tuple[tuple[Any, str, str], ...] = (
    ("-", "o", ""),
    ((0, (5, 2)), "s", "//"),
    ((0, (1, 1.2)), "^", ".."),
    ((0, (6, 2, 1, 2)), "D", "xx"),
    ((0, (9, 3)), "v", "\\\\"),
    ((0, (3, 1, 1, 1, 1, 1)), "P", "oo"),
)


@dataclass(frozen=True)
class Style:
    """How a method is drawn."""

    colour: str
    line: Any
    marker: str
    hatch: str


_TABLE = {name: Style(colour, *row) for colour, names in COLOURS.items() for name, row in zip(names, ROWS, strict=False)}


def style_of(method: str) -> Style:
    """Return a method's style; one of somebody else's gets a cross, in a colour and line that its name alone decides."""
    if method in _TABLE:
        return _TABLE[method]
    number = zlib.crc32(method.encode())
    line, _, hatch = ROWS[number // len(COLOURS) % len(ROWS)]
    return Style(list(COLOURS)[number % len(COLOURS)], line, "X", hatch)


def styles(labels: Sequence[str], methods: Sequence[str] | None = None) -> dict[str, Style]:
    """Return the style of each label of one figure.

    ``methods``: the method behind each label; without them a label such as ``pmfl/no_mct``, ``fedrcl+fedadam`` or
    ``pmfl beta=0.1`` names it first. Several labels of one method share its colour and differ in line, marker
    and hatch, also from other methods of that colour; the seventh of them begins with other colours.
    """
    methods = methods or [method_of(label) for label in labels]
    found: dict[str, Style] = {}
    times: dict[str, int] = {}
    taken = set(map(style_of, methods))
    for label, method in zip(labels, methods, strict=True):
        first, again = style_of(method), times.get(method, 0)
        times[method] = again + 1
        start = next((i for i, row in enumerate(ROWS) if row[0] == first.line), 0) + again
        rows = [ROWS[(start + i) % len(ROWS)] for i in range(len(ROWS))]
        others = [Style(colour, *row) for colour in (first.colour, *COLOURS) for row in rows]
        found[label] = next((look for look in others if look not in taken), others[0]) if again else first
        taken.add(found[label])
    return found


def method_of(label: str) -> str:
    """Return the method that a label names first."""
    for mark in "/+ ":
        label = label.partition(mark)[0]
    return label
