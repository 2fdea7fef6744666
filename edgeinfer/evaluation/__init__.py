"""Quality: perplexity of a text, and divergence between two models' distributions."""
