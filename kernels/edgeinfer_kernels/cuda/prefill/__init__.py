"""Prompts in chunks."""
