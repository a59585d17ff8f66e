"""A model computed by several ranks: what each holds of it, and how they add up and gather what they computed."""
