"""The router's decisions, without I/O: the life of a request, queues, the fleet, and who gets what."""
