"""LoRA adapters: read from GGUF files and PEFT folders, and added to the matrices of a loaded model."""
