"""What each client does, as a program that runs where the client is installed."""
