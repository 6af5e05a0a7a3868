"""The Hydra groups, shipped as package data."""

if __name__ == "conf":
    raise ImportError("'conf' is no package of its own. Fix: import contrafed.conf")
