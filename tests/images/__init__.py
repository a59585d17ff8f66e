"""What holds for images before they are built: the files they are made from, read as text."""
