"""Draft heads: drafters that read the hidden states of their target."""
