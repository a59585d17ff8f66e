"""Every field of a request: what becomes of it, and how a body is read by that."""
