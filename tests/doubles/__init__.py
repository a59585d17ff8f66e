"""Second implementations of the product's protocols, for tests that need no sockets and no NIXL."""
