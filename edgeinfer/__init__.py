"""edgeinfer: run a language model on the machine in front of you."""
