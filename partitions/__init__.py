"""Data sets, who holds which part of them, and who shows up when."""

if __name__ == "partitions":
    raise ImportError("'partitions' is no package of its own. Fix: import contrafed.partitions")
