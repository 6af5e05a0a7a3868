"""central: the server clips each reply and adds noise to their sum, so that the global model tells little of one node."""

from dataclasses import dataclass

from contrafed.core.privacy.gaussian import Gaussian


@dataclass(frozen=True)
class Config(Gaussian):
    """Settings of the noise."""

    amplification: bool  # privacy amplification by sampling: epsilon holds only while who took part is secret
