"""Data sets, who holds which part of them, and who shows up when."""
