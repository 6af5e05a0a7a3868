"""Robust alternatives to a strategy's plain mean: a ``Config`` and an ``Aggregation`` in each file."""
