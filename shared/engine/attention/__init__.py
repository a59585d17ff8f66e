"""Attention over the paged KV cache: a protocol and its implementations, one per kind of device."""
