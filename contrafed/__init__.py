"""Contrafed: contrastive and personalised federated learning on Flower.

``run`` and ``compose`` are the notebook's way in: ``run(compose("strategy=pmfl", "num_rounds=50"))``.
"""

from typing import Any

from core.errors import UserError

__all__ = ["UserError", "compose", "run"]


def __getattr__(name: str) -> Any:
    # Lazily: a node that imports core.codec needs neither Hydra nor the engines.
    if name in ("run", "compose"):
        from contrafed import experiment

        return getattr(experiment, name)
    raise AttributeError(name)
