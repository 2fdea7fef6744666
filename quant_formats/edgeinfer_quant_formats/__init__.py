"""What the bytes mean: GGUF files and the block formats inside them."""
