"""Decode steps of 1 to 8 tokens, captured as CUDA graphs."""
