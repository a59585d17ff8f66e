"""KV pages over TCP with TLS 1.3 and AES-256-GCM: what prefill and decode use where the network is not trusted."""
