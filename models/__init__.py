"""Split networks: encoder, projector, classifier."""
