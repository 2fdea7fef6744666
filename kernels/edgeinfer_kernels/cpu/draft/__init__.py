"""Drafts and their verification on the CPU, and the hidden states that drafters read."""
