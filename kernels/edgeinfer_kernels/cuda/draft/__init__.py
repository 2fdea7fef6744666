"""Draft heads on a GPU: the states that a target keeps, the input of a head, and its loop of draft tokens."""
