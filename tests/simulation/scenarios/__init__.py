"""What a seed decides of a world before it begins."""
