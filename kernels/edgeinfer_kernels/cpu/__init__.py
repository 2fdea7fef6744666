"""The numba backend: kernels with sixteen lanes, a thread pool, one call per block."""
