"""A Little Is Enough: all attackers send the same change, just within the spread of the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers, moments


@dataclass(frozen=True)
class Config(Attackers):
    """Who attacks, how much, and knowing what."""

    z: Annotated[float, Range(ge=0)] | None
    known: Literal["honest", "attackers"]

    @property
    def needs_honest(self) -> bool:
        """Whether it is their changes that attackers know."""
        return self.known == "honest"


class ALIE(Attack):
    """Delta' = mean - z std of every number, z = z_max of this round's participants. Source: Baruch et al. 2019, Algorithm 3.

    Readings: mean and deviation are by default those of the honest participants' changes, as most comparisons have it; the
    paper's attackers know their own alone (``known=attackers``). Without any to know they send their own change.
    """

    def replace(self, own: Mapping[int, Tensors], honest: Mapping[int, Tensors], server_round: int) -> dict[int, Tensors]:
        """Return the same change for every attacker."""
        known = honest if self.config.known == "honest" else own
        if not known:
            return dict(own)
        mean, spread = moments(known.values())
        z = z_max(len(own) + len(honest), len(own)) if self.config.z is None else self.config.z
        change = {name: mean[name] - z * spread[name] for name in mean}
        return dict.fromkeys(own, change)


def z_max(participants: int, attackers: int) -> float:
    """Return the z up to which Phi(z) < (n - f - s) / (n - f), s = floor(n/2 + 1) - f the honest nodes that a majority needs.

    Of n participants f attack. Where f are a majority by themselves s counts as 1. 0 where the formula has no or a negative
    answer: few attackers can shift the mean only to where most honest nodes are, which is not beyond it.
    """
    honest = participants - attackers
    needed = max(1, participants // 2 + 1 - attackers)
    share = (honest - needed) / honest if honest else 0.0
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0
