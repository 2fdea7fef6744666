"""Weights in the layouts that the CPU kernels read."""
