"""The numba backend: kernels in sixteen lanes, a thread team, one call a block."""
