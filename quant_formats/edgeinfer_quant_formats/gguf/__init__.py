"""GGUF files: metadata, tensor table, reading and writing."""
