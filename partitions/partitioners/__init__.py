"""One file for each partition: ``Config`` and ``split(config, draw)`` (or ``explicit``, or ``lazy``).

With ``RANDOM_SIZES = False`` another draw has the same sizes. With ``FIXED_CLASSES = True`` no example of a class may be moved
to a client that does not hold the class.
"""
