"""Give each method its colour, line style, marker and hatch in every figure, by its name, also for colour-blind readers."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contrafed.runs.output.figures import BLUE, GREEN, ORANGE

# Okabe and Ito's colours, with a brown in place of their yellow, which is too pale for a line on white.
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F5539")
# Of ten classes: with two of Paul Tol's colours, which readers with protanopia or deuteranopia can distinguish from these.
CLASSES = (*COLOURS, "#332288", "#DDCC77")
# Line style, marker, hatch.
ROWS: tuple[tuple[Any, str, str], ...] = (
    ("-", "o", ""),
    ((0, (5, 2)), "s", "//"),
    ((0, (1, 1.2)), "^", ".."),
    ((0, (6, 2, 1, 2)), "D", "xx"),
    ((0, (9, 3)), "v", "\\\\"),
    ((0, (3, 1, 1, 1, 1, 1)), "P", "oo"),
    ((0, (1, 4)), "X", "**"),
)
NUM_NAMED_ROWS = 6  # a name alone gets one of the first so many, the rest keep many methods of one figure apart


@dataclass(frozen=True)
class Style:
    """The look of a method."""

    colour: str
    line: Any
    marker: str
    hatch: str


def style_of(method: str) -> Style:
    """Return a method's style, which depends only on its name."""
    number = zlib.crc32(method.encode())
    return Style(COLOURS[number % len(COLOURS)], *ROWS[number // len(COLOURS) % NUM_NAMED_ROWS])


def styles(labels: Sequence[str], methods: Sequence[str] | None = None) -> dict[str, Style]:
    """Return the style of each label of one figure, all different as long as styles are left.

    Several labels of one method share its colour and differ in line, marker and hatch, also from other methods of that colour.
    From the seventh on they get other colours.

    Args:
        labels: The labels.
        methods: The method of each label. By default a label such as ``pmfl/no_mct``, ``fedrcl+fedadam`` or ``pmfl beta=0.1``
            begins with it.
    """
    methods = methods or [method_of(label) for label in labels]
    firsts = _tell_apart(methods)
    found: dict[str, Style] = {}
    taken, seen = set(firsts.values()), set[str]()
    for label, method in zip(labels, methods, strict=True):
        first = firsts[method]
        start = next(i for i, row in enumerate(ROWS) if row[0] == first.line)
        rows = [ROWS[(start + i) % len(ROWS)] for i in range(len(ROWS))]
        others = [Style(colour, *row) for colour in (first.colour, *COLOURS) for row in rows]
        found[label] = next((look for look in others if look not in taken), others[0]) if method in seen else first
        taken.add(found[label])
        seen.add(method)
    return found


def distinct_styles(labels: Sequence[str]) -> dict[str, Style]:
    """Return the style of each label of one figure of a paper. No two share a colour, a line style or a marker.

    A label keeps its name's colour and marker if they are free. The alphabetically first is served first, so that the order of
    the labels does not matter. After ``len(ROWS)`` labels line styles and markers repeat.
    """
    found: dict[str, Style] = {}
    for label in sorted(labels):
        own = style_of(label)
        colours, rows = [style.colour for style in found.values()], [style.marker for style in found.values()]
        first, row = COLOURS.index(own.colour), [marker for _, marker, _ in ROWS].index(own.marker)
        colour = min((COLOURS[(first + i) % len(COLOURS)] for i in range(len(COLOURS))), key=colours.count)
        line = min((ROWS[(row + i) % len(ROWS)] for i in range(len(ROWS))), key=lambda one: rows.count(one[1]))
        found[label] = Style(colour, *line)
    return found


def _tell_apart(methods: Sequence[str]) -> Mapping[str, Style]:
    """Return the style of each method of one figure: its own, or with the next free colour if another method has that one.

    The alphabetically first keeps its own, so that the order of the labels does not matter.
    """
    found: dict[str, Style] = {}
    for method in sorted(set(methods)):
        own, used = style_of(method), {style.colour for style in found.values()}
        start = COLOURS.index(own.colour)
        colours = [COLOURS[(start + i) % len(COLOURS)] for i in range(len(COLOURS))]
        free = [replace(own, colour=colour) for colour in colours if colour not in used]
        looks = free or [Style(colour, *row) for colour in colours for row in ROWS]
        found[method] = next((look for look in looks if look not in found.values()), looks[0])
    return found


def method_of(label: str) -> str:
    """Return the method at the start of a label."""
    for mark in "/+ ":
        label = label.partition(mark)[0]
    return label
