"""Which client connections may be open, and which one goes for a newer one."""
