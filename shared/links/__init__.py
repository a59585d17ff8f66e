"""Authenticated message links between routers and workers; they know sessions and peers, never KV."""
