"""What of a model is used: counting active neurons over a text, and learning to predict them."""
