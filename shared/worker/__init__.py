"""A worker's process: its settings, its loop, its page memory, and the grammars that it must not be hurt by."""
