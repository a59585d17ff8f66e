"""A worker of several ranks: rank 0 schedules and tells its followers what to do. Knows no tensors and no scheduler."""
