"""Weights that are read from files while tokens are computed."""
