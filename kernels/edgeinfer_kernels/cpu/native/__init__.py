"""What numba compiles. Only the build process imports this package: a warm start needs none of it."""
