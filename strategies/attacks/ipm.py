"""Inner product manipulation: all attackers send the honest nodes' mean change against its direction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers, moments


@dataclass(frozen=True)
class Config(Attackers):
    """Who attacks, and how much."""

    epsilon: Annotated[float, Range(gt=0)]

    @property
    def needs_honest(self) -> bool:
        """It is their mean that is turned round."""
        return True


class IPM(Attack):
    """Delta' = -epsilon mean of the honest participants' Delta. Source: Xie et al. 2020, Equation 2; prototypes likewise.

    A plain mean turns round when epsilon exceeds honest over attackers; a small epsilon is within the spread of the others.
    Without an honest participant attackers send their own change.
    """

    def replace(self, own: Mapping[int, Tensors], honest: Mapping[int, Tensors], server_round: int) -> dict[int, Tensors]:
        """Return the same change for every attacker."""
        if not honest:
            return dict(own)
        mean, _ = moments(honest.values())
        change = {name: -self.config.epsilon * value for name, value in mean.items()}
        return dict.fromkeys(own, change)
