"""Contrafed: contrastive and personalised federated learning on Flower.

Everything is imported from here on: ``contrafed.clients.moon``, ``contrafed.strategies.pmfl``. Authors of methods and notebooks
need the names below only: ``from contrafed import Client, FederatedStrategy, LocalTraining``, ``run(compose("strategy=pmfl"))``.
They are loaded on first use, so that a mistake on the command line is answered before torch is imported.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contrafed.core.errors import UserError
    from contrafed.runs.run import compose, run
    from contrafed.server.base import FederatedStrategy
    from contrafed.training.base import Client, LocalTraining

# In a checkout and in a Flower app bundle clients/, strategies/ and the other folders are beside this package. A wheel has
# them inside it.
if not (Path(__file__).parent / "clients").is_dir():
    __path__.append(str(Path(__file__).resolve().parent.parent))

__all__ = ["Client", "FederatedStrategy", "LocalTraining", "UserError", "compose", "run"]

_HOMES = {
    "Client": "contrafed.training.base",
    "FederatedStrategy": "contrafed.server.base",
    "LocalTraining": "contrafed.training.base",
    "UserError": "contrafed.core.errors",
    "compose": "contrafed.runs.run",
    "run": "contrafed.runs.run",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'contrafed' has no attribute {name!r}")
