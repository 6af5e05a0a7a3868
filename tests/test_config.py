"""Types of a ``Config``'s fields: bounds hold for items too, lists have their length, and other types are named."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest

from contrafed.core.schema import Range, convert


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("hint", "value", "found"),
    [
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[float, float], [1, 2.5], (1.0, 2.5)),
        (list[float], [1, 2], [1.0, 2.0]),
        (Annotated[tuple[int, ...], Range(ge=1)], [1, 3], (1, 3)),
        (Annotated[tuple[int, ...], Range(ge=1)] | None, None, None),
    ],
)
def test_lists_of_a_configuration(hint, value, found):
    assert convert(hint, value, "key") == found


@pytest.mark.parametrize(
    ("hint", "value", "key"),
    [
        (Annotated[tuple[int, ...], Range(ge=1)], [1, -3], "key"),
        (tuple[float, float], [1.0], "key"),
        (tuple[int, str], ["a", "b"], "key[0]"),
        (Path, "x", "key"),
        (Colour, "RED", "key"),
        (dict[str, int], {}, "key"),
    ],
)
def test_what_a_key_cannot_be(expect_error, hint, value, key):
    with expect_error(key):
        convert(hint, value, "key")
