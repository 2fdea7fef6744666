"""The machine: memory, speeds measured on it, machines described by text."""
