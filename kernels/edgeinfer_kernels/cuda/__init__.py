"""The Triton backend: a decoder on a CUDA device, one captured CUDA graph per decode step."""
