"""Model loading, from a name and options to an engine: select devices, check memory, load weights."""
