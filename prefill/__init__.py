"""The prefill role: computes the KV of prompts in EXTEND batches and hands it over under leases."""
