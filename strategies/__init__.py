"""The strategy of every method."""

if __name__ == "strategies":
    raise ImportError("'strategies' is no package of its own. Fix: import contrafed.strategies")
