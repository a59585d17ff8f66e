"""The HTTP side: OpenAI's requests in, JSON and server-sent events out."""
