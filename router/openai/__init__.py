"""The APIs that clients speak: OpenAI's, and Anthropic's as a translation; from a body to requests to the core, and back."""
