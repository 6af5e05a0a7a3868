"""One file per partition: ``Config`` and ``split(config, draw)`` (or ``explicit``, or ``lazy``)."""
