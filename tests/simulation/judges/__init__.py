"""Rules that are proven while a world runs, from books of their own."""
