"""The kernels of Gemma 3n's blocks."""
