"""A model computed by several ranks: what each holds, how they add up and gather, and what rank 0 tells the others."""
