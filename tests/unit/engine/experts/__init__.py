"""Mixtures of experts: routing, blocks, and what is planned and refused for them."""
