"""The Hydra groups, shipped as package data."""
