"""The reader of command lines: argparse, whose mistakes are said as everything here says them."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from contrafed.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` that takes no shortened options and raises ``UserError`` where that one ends the process."""

    def __init__(self, program: str, **kwargs: Any) -> None:
        """``program``: how the user calls it; the others as of ``argparse.ArgumentParser``."""
        super().__init__(program, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError``."""
        raise UserError(f"{message} ({self.prog} --help)")


def program(installed: str, script: str) -> str:
    """Return how the user called what is the command ``installed`` of the package, and ``script`` in the repository."""
    return installed if Path(sys.argv[0]).name == installed else script
