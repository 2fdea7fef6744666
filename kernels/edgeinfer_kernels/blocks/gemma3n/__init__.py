"""The kinds of blocks of Gemma 3n: AltUp, Laurel and a feed-forward with few active neurons, on the CPU."""

CPU_ONLY = "a model with AltUp runs on the CPU so far"
