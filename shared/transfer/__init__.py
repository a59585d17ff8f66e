"""Moving KV pages between workers by reads, over NIXL or TLS. `protocol` is what the schedulers see."""
