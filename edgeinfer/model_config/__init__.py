"""The model config from a GGUF file: architecture, sizes, weights by name."""
