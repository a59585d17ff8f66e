"""How models write thoughts and calls of tools, and how they are read from the text of an answer."""
