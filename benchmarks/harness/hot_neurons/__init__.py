"""Planted ReLU models as files, and split models that compute only their active neurons."""
