"""Which workers exist and at which address, from a static list or from Kubernetes; and the router's peers."""
