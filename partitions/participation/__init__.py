"""One file per participation pattern: a ``Config`` that inherits ``Selection``, and a ``Participation``."""
