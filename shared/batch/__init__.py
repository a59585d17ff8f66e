"""What a scheduler passes to its loop: requests, batches, effects."""
