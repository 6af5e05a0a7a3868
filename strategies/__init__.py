"""The server half of every method."""
