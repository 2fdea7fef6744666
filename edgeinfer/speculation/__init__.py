"""Speculative decoding: cheap guesses of what comes next, checked by the model many at a time."""
