"""The `segue` command: a whole deployment on this machine, its model, and the smoke test."""
