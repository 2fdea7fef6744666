"""Attention, RoPE and KV cache writes."""
