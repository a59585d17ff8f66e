"""Moving KV pages between workers by reads, over NIXL or sealed TCP. `protocol` is what the schedulers see."""
