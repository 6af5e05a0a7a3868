"""One file for each participation pattern: a ``Config`` that inherits ``Selection``, and a ``Participation``."""
