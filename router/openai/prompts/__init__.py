"""From text, chats and tools to the token ids of a prompt."""
