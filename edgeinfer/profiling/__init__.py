"""Activity profiling: counts active neurons and experts on a text, and trains predictors of them."""
