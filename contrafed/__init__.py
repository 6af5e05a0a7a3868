"""Contrafed: contrastive and personalised federated learning on Flower.

The public interface for authors of methods and for notebooks::

    from contrafed import Client, FederatedStrategy, LocalTraining, Config, compose, run, UserError

These names are loaded on first use. So a mistake on the command line is answered before torch is imported. Everything else is
imported by its place: ``contrafed.clients.moon``, ``contrafed.strategies.pmfl``, ``contrafed.training.losses``.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contrafed.core.errors import UserError
    from contrafed.runs.run import compose, run
    from contrafed.server.base import FederatedStrategy
    from contrafed.training.base import Client, Config
    from contrafed.training.local_training import LocalTraining

__all__ = ["Client", "Config", "FederatedStrategy", "LocalTraining", "UserError", "compose", "run"]

# In a checkout and in a Flower app bundle, clients/, strategies/, models/, partitions/ and conf/ are next to this package. In a
# wheel they are inside it.
if not (Path(__file__).parent / "clients").is_dir():
    __path__.append(str(Path(__file__).resolve().parent.parent))

_MODULES = {
    "Client": "contrafed.training.base",
    "Config": "contrafed.training.base",
    "FederatedStrategy": "contrafed.server.base",
    "LocalTraining": "contrafed.training.local_training",
    "UserError": "contrafed.core.errors",
    "compose": "contrafed.runs.run",
    "run": "contrafed.runs.run",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'contrafed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
