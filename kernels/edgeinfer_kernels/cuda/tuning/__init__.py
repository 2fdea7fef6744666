"""Kernel shapes by GPU: compile targets, measured speeds, the tuner."""
