"""One file per participation pattern: ``Config`` and a ``Participation``."""
