"""Data sets, their partitions over clients, and participation patterns."""

if __name__ == "partitions":
    raise ImportError("'partitions' is no package of its own. Fix: import contrafed.partitions")
