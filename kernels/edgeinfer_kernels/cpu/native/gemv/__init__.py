"""GEMV: matrix rows times vectors, for every weight format."""
