"""The workers as the core knows them, and which of them a request goes to."""
