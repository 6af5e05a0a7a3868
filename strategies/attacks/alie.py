"""A Little Is Enough: all attackers upload the same update, just within the spread of the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers, moments


@dataclass(frozen=True)
class Config(Attackers):
    """The attackers, the strength of the attack, and the updates that attackers know."""

    z: Annotated[float, Range(ge=0)] | None
    known: Literal["honest", "attackers"]

    @property
    def needs_honest(self) -> bool:
        """Whether attackers know the honest clients' updates."""
        return self.known == "honest"


class ALIE(Attack):
    """Replace every attacker's update by Delta' = mean - z std of every number.

    z is z_max of this round's participants. Without known updates, attackers upload their own.

    Source: Baruch et al. 2019, Algorithm 3.

    Interpretation: by default, mean and std are of the honest participants' updates, as in most comparisons. The paper's
    attackers know their own updates alone (``known=attackers``).
    """

    def replace(self, own: Mapping[int, Tensors], honest: Mapping[int, Tensors], server_round: int) -> dict[int, Tensors]:
        """Return the same update for every attacker."""
        known = honest if self.config.known == "honest" else own
        if not known:
            return dict(own)
        mean, spread = moments(known.values())
        z = z_max(len(own) + len(honest), len(own)) if self.config.z is None else self.config.z
        change = {name: mean[name] - z * spread[name] for name in mean}
        return dict.fromkeys(own, change)


def z_max(participants: int, attackers: int) -> float:
    """Return the z up to which Phi(z) < (n - f - s) / (n - f), for f attackers of n participants.

    s = floor(n/2 + 1) - f is the number of honest clients that a majority needs, and at least 1.

    Returns:
        z, or 0 if the formula has no solution or a negative one.
        With few attackers the mean can only shift to values that are common among honest clients.
    """
    honest = participants - attackers
    needed = max(1, participants // 2 + 1 - attackers)
    share = (honest - needed) / honest if honest else 0.0
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0
