"""Figures that want a GPU: many sequences, single steps, where their time goes, and attention by layout."""
