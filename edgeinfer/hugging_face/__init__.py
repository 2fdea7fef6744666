"""Hugging Face folders as models: config.json, safetensors and tokenizer.json in the terms of GGUF."""
