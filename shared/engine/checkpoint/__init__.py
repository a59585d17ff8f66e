"""What a checkpoint is: its configuration, family and dtypes, the KV cache it needs, and the memory that takes."""
