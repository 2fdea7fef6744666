"""Triton functions that several kernels use."""
