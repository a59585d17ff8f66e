"""Workers that lie, routers that talk nonsense, and thieves of KV."""
