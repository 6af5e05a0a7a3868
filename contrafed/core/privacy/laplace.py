"""laplace: every client adds Laplace noise to its upload, as in MpFedcon's Table 4.

Nothing is clipped, so no epsilon can be reported.
"""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range


@dataclass(frozen=True)
class Config:
    """Settings of the noise."""

    variance: Annotated[float, Range(gt=0)]  # of the noise on every number, with scale b = sqrt(variance / 2)
    seeded_noise: bool  # a function of the run's seed, else of the operating system's entropy
