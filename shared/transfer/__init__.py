"""Moving KV pages between workers by one-sided reads. `protocol` is what the schedulers see."""
