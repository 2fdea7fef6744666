"""Weights that are read from a file while tokens are computed."""
