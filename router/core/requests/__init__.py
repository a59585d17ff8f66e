"""A request from its arrival to its end: states, tenants, the queue, attempts, reservations, choices of one prompt."""
