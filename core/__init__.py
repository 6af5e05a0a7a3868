"""The ground: what every other room stands on. Imports none of them."""

if __name__ == "core":
    raise ImportError("this package is imported as contrafed.core")
