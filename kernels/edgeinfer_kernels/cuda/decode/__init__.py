"""Decode steps of 1 to 16 tokens, captured as CUDA graphs."""
