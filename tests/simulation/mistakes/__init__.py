"""Mistakes to plant in the product, one at a time."""
