"""Speculative decoding: cheap draft tokens, verified by the model several at a time."""
