"""The strategy of every method."""

if __name__ == "strategies":
    raise ImportError("this package is imported as contrafed.strategies")
