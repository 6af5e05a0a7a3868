"""Data sets, who holds which part of them, and who shows up when."""

if __name__ == "partitions":
    raise ImportError("this package is imported as contrafed.partitions")
