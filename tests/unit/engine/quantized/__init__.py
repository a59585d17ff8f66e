"""Weights in fewer bits: what they are worth, by each format's own formula."""
