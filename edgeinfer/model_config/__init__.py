"""What a model file says of its model: architecture, sizes, weights by name."""
