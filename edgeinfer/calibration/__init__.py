"""Calibration: what a text shows about the weights of a model, for a better choice of their bits."""
