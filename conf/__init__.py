"""The Hydra groups, shipped as package data."""

if __name__ == "conf":
    raise ImportError("this package is imported as contrafed.conf")
