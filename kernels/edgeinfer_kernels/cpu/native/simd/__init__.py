"""SIMD operations that numba compiles for every instruction set."""
