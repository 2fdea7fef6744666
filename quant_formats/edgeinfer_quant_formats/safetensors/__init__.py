"""safetensors files: a JSON header and tensors, which are mapped and never executed."""
