"""Ahead-of-time compilation of kernels: CPU features, units, object files and their cache."""
