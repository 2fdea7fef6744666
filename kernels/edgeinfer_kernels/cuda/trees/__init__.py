"""Draft trees on a GPU: where the tokens of a tree's step are, and the path of it that is kept."""
