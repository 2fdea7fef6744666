"""Weights in the layouts that the CUDA kernels read."""
