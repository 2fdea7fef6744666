"""Model quantization: type mixes, importance matrices, neuron order."""
