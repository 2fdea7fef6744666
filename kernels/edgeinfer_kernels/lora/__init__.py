"""LoRA adapters as the backends take them, and their sizes."""
