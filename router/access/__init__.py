"""Whose a request is, and how much of this router it may have: keys, quotas, origins of pages, budgets of bytes."""
