"""Tensor parallel on GPUs: sums and gathers over the ranks."""
