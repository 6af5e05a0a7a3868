"""Read command lines with argparse, and report mistakes like all others."""

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn

from contrafed.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """An ``argparse.ArgumentParser`` without abbreviated options, which raises ``UserError`` instead of ending the process."""

    def __init__(self, program: str, **kwargs: Any) -> None:
        """Build the parser.

        Args:
            program: The command as the user typed it.
            **kwargs: Arguments of ``argparse.ArgumentParser``.
        """
        super().__init__(program, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError``."""
        raise UserError(f"{message} ({self.prog} --help)")


def program(installed: str, script: str) -> str:
    """Return the command as the user typed it: ``installed`` from the package, ``script`` in the repository."""
    return installed if Path(sys.argv[0]).name == installed else script
