"""KV caches of the CUDA backend."""
