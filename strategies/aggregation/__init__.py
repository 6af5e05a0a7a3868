"""What may stand in the place of a rule's plain mean: a ``Config`` and an ``Aggregation`` in a file each."""
