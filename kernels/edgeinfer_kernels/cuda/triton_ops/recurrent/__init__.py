"""The kernels of recurrent blocks."""
