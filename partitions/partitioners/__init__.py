"""One file per partition: ``Config`` and ``split(config, draw)`` (or ``explicit``, or ``lazy``).

``RANDOM_SIZES = False`` says that another draw has the same sizes; ``FIXED_CLASSES = True`` that no example of a class which
a node does not hold may be moved to it.
"""
