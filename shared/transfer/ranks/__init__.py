"""The transfer of a worker whose ranks are processes: rank 0 tells the others what to offer and what to read."""
