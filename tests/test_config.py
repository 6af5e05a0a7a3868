"""Types of a ``Config``'s fields: bounds hold for items too, lists have their length, and other types are named."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest

from contrafed.core.errors import UserError
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
    ("hint", "value", "message"),
    [
        (Annotated[tuple[int, ...], Range(ge=1)], [1, -3], "key must be >= 1, got -3"),
        (tuple[float, float], [1.0], "key must be a list of 2, got 1: [1.0]"),
        (tuple[int, str], ["a", "b"], "key[0] must be a whole number, got 'a'"),
        (Path, "x", "key: Config has Path, which no key can be; int, float, bool, str, dict, Literal, list[...]"),
        (Colour, "RED", "key: Config has Colour, which no key can be; int, float, bool, str, dict"),
        (dict[str, int], {}, "key: Config has dict[str, int], which no key can be; int"),
    ],
)
def test_what_a_key_cannot_be(hint, value, message):
    with pytest.raises(UserError) as found:
        convert(hint, value, "key")
    assert str(found.value).startswith(message)
