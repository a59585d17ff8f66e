"""Kernels of our own: each with the function that launches it; NVRTC compiles them at start, g++ in tests."""
