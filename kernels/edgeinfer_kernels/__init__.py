"""Model kernels: numpy reference, numba CPU and Triton CUDA backends."""
