"""Describe the paper of a method, as the documentation and the catalogue cite it."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """Authors, title, venue and link of a paper."""

    authors: str
    title: str
    where: str  # venue and year
    url: str = ""

    @property
    def year(self) -> int:
        """The year in ``where``.

        Raises:
            ValueError: If there is none.
        """
        found = re.search(r"\b(?:19|20)\d\d\b", self.where)
        if found is None:
            raise ValueError(f"no year in {self.where!r}")
        return int(found[0])
