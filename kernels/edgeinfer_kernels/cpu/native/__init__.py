"""The code that numba compiles. Only the build process imports this package; a warm start does not need
it.
"""
