"""Whole numbers of clients and examples from shares of them."""

import math


def round_up(value: float) -> int:
    """Return the smallest whole number that is not below the value. A rounding error does not count: 0.07 * 100 gives 7."""
    return math.ceil(round(value, 9))
