"""OpenAI's API, and Anthropic's as a translation: from a body to requests to the core, and from tokens to an answer."""
