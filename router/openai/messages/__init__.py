"""Anthropic's Messages API as a translation onto chats: same bounds, same tokens, nothing stored."""
