"""The inference engine: token ids to logits, with a KV cache."""
