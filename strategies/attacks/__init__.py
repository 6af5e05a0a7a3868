"""Clients that attack, in simulation only: a ``Config`` in each file, and an ``Attack`` that replaces their uploads."""
