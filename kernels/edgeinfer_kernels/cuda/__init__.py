"""The Triton backend: a decoder on a CUDA device, one captured graph a decode step."""
