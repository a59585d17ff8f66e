"""The prefill role: computes the KV of prompts in EXTEND batches, and leases the pages to decode workers."""
