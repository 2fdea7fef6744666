"""Hidden states on a GPU: a target keeps them for its draft head, and the head its own."""
