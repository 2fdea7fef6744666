"""The kinds of blocks of Gemma 3n: AltUp, Laurel and a feed-forward with few active neurons."""
