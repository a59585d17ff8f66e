"""What crosses processes: messages, batons, sampling parameters, sampled tokens, and the bounds of their numbers."""
