"""Tests of the ranks of a worker: the ring of orders, its ends, and the processes."""
