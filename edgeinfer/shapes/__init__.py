"""Shapes of well-known models: the sizes that determine speed and memory, without weights."""
