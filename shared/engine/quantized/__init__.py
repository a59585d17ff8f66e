"""Weights in fewer than 16 bits as safetensors hold them: how a file says so, and how they are computed with."""
