"""The client of `segue bench`: its arithmetic and its reading of streams."""
