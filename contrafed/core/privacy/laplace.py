"""laplace: every node adds Laplace noise to what it sends, as in MpFedcon's Table 4.

Nothing is clipped, so there is no epsilon to tell.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from contrafed.core.schema import Range


@dataclass(frozen=True)
class Config:
    """Settings of the noise."""

    variance: Annotated[float, Range(gt=0)]  # of the noise on every number; its scale b is sqrt(variance / 2)
    noise: Literal["seeded", "secret"]  # a function of the run's seed, or of this machine's entropy
