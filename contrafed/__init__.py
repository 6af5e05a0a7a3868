"""Contrafed: contrastive and personalised federated learning on Flower.

``run`` and ``compose`` are the notebook's way in: ``run(compose("strategy=pmfl", "num_rounds=50"))``.
"""

import importlib.util
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
            hides = f"{found} hides it: rename that file, or start from another folder" if found else "it is not there"
            raise ImportError(f"contrafed needs its own package '{name}', but {hides}")


_check_packages()

from core.errors import UserError  # noqa: E402 -- only now is it known that core is ours


def __getattr__(name: str) -> Any:
    # Lazily: a node that imports core.codec needs neither Hydra nor the engines.
    if name in ("run", "compose"):
        from contrafed import experiment

        return getattr(experiment, name)
    raise AttributeError(name)
