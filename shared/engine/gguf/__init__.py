"""GGUF files: converted once to a model folder, their quantized blocks kept as they are."""
