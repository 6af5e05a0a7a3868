"""Split networks: encoder, projector, classifier."""

if __name__ == "models":
    raise ImportError("this package is imported as contrafed.models")
