"""tokenizer.json as the metadata of a GGUF vocabulary."""
