"""Kernel tile configs by GPU: compile targets, speed measurements, the tuner."""
