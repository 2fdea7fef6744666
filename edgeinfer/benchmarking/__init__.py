"""Measuring speed: files of real shapes, repeated and interleaved runs, tables."""
