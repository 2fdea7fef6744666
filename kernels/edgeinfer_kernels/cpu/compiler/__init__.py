"""Compiling kernels ahead of their use: processor features, units, object files, their cache."""
