"""Measuring quality: perplexity of a text, and how far a model's distributions lie from another's."""
