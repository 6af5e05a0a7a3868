"""Local training over a leading node axis."""
