"""Speculative decoding of several texts at once."""
