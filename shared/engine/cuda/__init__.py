"""The engine on CUDA: a stream, state by slot on the device, graphs for DECODE, and a host that never waits for it."""
