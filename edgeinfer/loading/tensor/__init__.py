"""Tensor parallel: loading a model on several GPUs, one process for each."""
