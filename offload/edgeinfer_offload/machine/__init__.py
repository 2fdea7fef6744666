"""The machine: its memory, its measured speeds, and machines described by text."""
