"""The arithmetic: numpy reference, numba CPU and Triton CUDA kernels."""
