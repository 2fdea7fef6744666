"""GEMM with AMX tiles."""
