"""Weights in fewer than 16 bits as safetensors hold them: how a file says so, how they are read and computed with."""
