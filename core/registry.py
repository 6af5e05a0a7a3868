"""Finding the code that stands behind a choice: ``conf/GROUP/NAME.yaml`` -> ``PACKAGE/NAME.py``.

A YAML may say ``module: other`` when several choices share one file. Nothing is imported before it is chosen.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from core.errors import UserError, unknown

T = TypeVar("T")

CONF = Path(__file__).resolve().parent.parent / "conf"

# The keys every choice may carry beside its own settings.
COMMON_KEYS = frozenset({"name", "module"})


def choices(group: str) -> dict[str, str]:
    """Return {choice: its one-line description}, read from the first comment of each YAML of the group."""
    found = {}
    for path in sorted((CONF / group).glob("*.yaml")):
        if not path.stem.startswith("_"):
            lines = path.read_text(encoding="utf-8").splitlines()
            # Hydra wants its own "@package" comment first in an experiment.
            first = next(line for line in lines if not line.startswith("# @package"))
            found[path.stem] = first.removeprefix("#").strip()
    return found


def find(package: str, group: str, settings: Mapping[str, Any]) -> ModuleType:
    """Import the module of ``settings['module']`` or ``settings['name']`` from ``package``.

    Raises ``UserError`` naming the choices of ``group`` when there is none.
    """
    name = str(settings.get("module") or settings.get("name"))
    target = f"{package}.{name}"
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name != target:
            raise UserError(f"{group}={settings.get('name')} needs the Python package '{error.name}'") from error
        raise unknown(group, str(settings.get("name")), choices(group)) from None


def only_subclass(module: ModuleType, base: type[T]) -> type[T]:
    """Return the one subclass of ``base`` that ``module`` itself defines; a method's file needs no registration."""
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise TypeError(f"{module.__name__} must define exactly one {base.__name__}, found {len(own)}")
    return own[0]
