"""central: the server clips each reply and adds noise to their sum, so that the global model reveals little of one client."""

from dataclasses import dataclass

from contrafed.core.privacy.gaussian import Gaussian


@dataclass(frozen=True)
class Config(Gaussian):
    """Settings of the noise."""

    amplification: bool  # privacy amplification by sampling: epsilon holds only if the cohort stays secret
