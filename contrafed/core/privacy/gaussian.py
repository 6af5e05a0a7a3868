"""Settings of both kinds of Gaussian noise. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range


@dataclass(frozen=True)
class Gaussian:
    """Settings that privacy=central and privacy=local share."""

    clip_norm: Annotated[float, Range(gt=0)]  # C, the largest joint L2 norm of a client's update
    prototype_clip: Annotated[float, Range(gt=0)]  # the same for its prototypes, all classes together
    noise_multiplier: Annotated[float, Range(ge=0)]  # z: the noise's standard deviation is z times the sensitivity
    delta: Annotated[float, Range(gt=0, lt=1)]  # at which epsilon is reported
    seeded_noise: bool  # a function of the run's seed, else of the operating system's entropy
