"""Byte counts of weights, caches and buffers; no torch, no files."""
