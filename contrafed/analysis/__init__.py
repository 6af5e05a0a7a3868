"""What becomes of finished runs: tables beside the papers', figures, ``docs/RESULTS.md``. Nothing heavy is imported here."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["leave"]


def leave(folder: Path, runs: Sequence[Path]) -> None:
    """Leave the table and the figure of a sweep's ``runs``, its folders, in the sweep's ``folder``."""
    from contrafed.analysis import pages

    pages.leave(folder, runs)
