"""Who is taken into the queue, who may pass whom in it, and who is refused."""
