"""Measurements on demand, each printed beside a baseline of the same run."""
