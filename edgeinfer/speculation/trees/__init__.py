"""Draft trees: their shape, how they grow, and their verification in one forward."""
