"""The kernels of block kinds of the embedding that have a unit each."""
