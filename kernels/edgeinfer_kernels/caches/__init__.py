"""KV caches in main memory: element types, quantization, layouts, rings, and latent caches."""
