"""Networks split into encoder, projector and classifier."""

if __name__ == "models":
    raise ImportError("'models' is no package of its own. Fix: import contrafed.models")
