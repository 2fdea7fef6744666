"""Generating text: sequences and tokens, from a request to the end of a completion."""
