"""The structures of the kernels of Gemma 3n's blocks."""
