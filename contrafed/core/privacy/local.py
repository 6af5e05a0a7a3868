"""local: every client clips its upload and adds noise to it, so that the server itself learns little of one client."""

from dataclasses import dataclass

from contrafed.core.privacy.gaussian import Gaussian


@dataclass(frozen=True)
class Config(Gaussian):
    """Settings of the noise."""
