"""The formulas of Gemma 3n's kinds of blocks."""
