"""Where the bytes live: measure the machine, plan the memory, place the weights."""
