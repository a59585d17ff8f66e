"""Shares of a model, collectives, and models of several ranks."""
