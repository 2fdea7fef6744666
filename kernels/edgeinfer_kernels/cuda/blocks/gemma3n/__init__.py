"""Gemma 3n's kinds of blocks on a GPU."""
