"""Contrafed: contrastive and personalised federated learning on Flower.

``run`` and ``compose`` are the notebook's way in: ``run(compose("strategy=pmfl", "num_rounds=50"))``.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["UserError", "compose", "run"]

_HOME = Path(__file__).resolve().parent.parent
# Our top-level packages, whose names others may have taken too.
_PACKAGES = ("core", "models", "partitions", "clients", "strategies", "simulation", "conf")


def _check_packages() -> None:
    """Raise ``ImportError`` naming the file that hides one of our packages, say a ``models.py`` beside the user's script."""
    for name in _PACKAGES:
        spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
        found = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
        if found is None or Path(found).resolve().parent not in (_HOME / name, _HOME):
            raise ImportError(f"contrafed needs its own package '{name}', but {_hidden(found)}")


def _hidden(found: str | None) -> str:
    """Return what is in a package's place, and what to do about it."""
    if found is None:
        return "it is not there"
    path = Path(found).parent if Path(found).name == "__init__.py" else Path(found)
    what = "folder" if path.is_dir() else "file"
    given = [Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    away = f"take {path.parent} off PYTHONPATH" if path.parent.resolve() in given else "start from another folder"
    return f"{path} hides it: rename that {what}, or {away}"


_check_packages()

from core.errors import UserError  # noqa: E402 -- only now is it known that core is ours


def __getattr__(name: str) -> Any:
    # Lazily: a node that imports core.codec needs neither Hydra nor the engines.
    if name in ("run", "compose"):
        from contrafed import experiment

        return getattr(experiment, name)
    raise AttributeError(name)
