"""Quantizing a model: type mixes, importance, the order of neurons."""
