"""Nodes that attack, in simulation only: a ``Config`` in a file each, and an ``Attack`` where it replaces what nodes send."""
