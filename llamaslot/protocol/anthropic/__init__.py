"""Anthropic's request bodies, and their conversion to chats."""
