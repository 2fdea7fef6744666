"""Kernels that draft tokens, and find the tokens that verify them."""
