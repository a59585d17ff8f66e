"""Answers that are not streamed: what they may hold until all their choices are complete, and how they are written."""
