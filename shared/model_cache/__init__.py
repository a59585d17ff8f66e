"""Fills a folder with a model's files, once for all pods that share it."""
