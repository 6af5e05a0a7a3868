"""Inner product manipulation: all attackers upload the honest clients' mean update with its direction reversed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers, moments


@dataclass(frozen=True)
class Config(Attackers):
    """The attackers and the strength of the attack."""

    epsilon: Annotated[float, Range(gt=0)]

    @property
    def needs_honest(self) -> bool:
        """Whether attackers know the honest clients' updates: they reverse their mean."""
        return True


class IPM(Attack):
    """Replace every attacker's update by Delta' = -epsilon mean of the honest participants' Delta.

    Prototypes are replaced likewise. A plain mean reverses if epsilon exceeds the ratio of honest clients to attackers. A small
    epsilon is within the spread of the others. Without honest participants attackers upload their own updates.

    Source: Xie et al. 2020, Equation 2.
    """

    def replace(self, own: Mapping[int, Tensors], honest: Mapping[int, Tensors], server_round: int) -> dict[int, Tensors]:
        """Return the same update for every attacker."""
        if not honest:
            return dict(own)
        mean, _ = moments(honest.values())
        change = {name: -self.config.epsilon * value for name, value in mean.items()}
        return dict.fromkeys(own, change)
