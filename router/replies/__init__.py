"""What is answered where nothing is generated: errors in the words of each API, and paths that are not served."""
