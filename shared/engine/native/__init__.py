"""Compiled CPU kernels: built once per machine, called over a C interface, chosen by instruction set."""
