"""The decode role: fetches the KV of prefilled requests and generates their tokens, one DECODE step after another."""
