"""/v1/responses as a translation onto chats: its fields, its input, and its typed events."""
