"""Tests that need a GPU, and skip with the reason where there is none."""
