"""OpenAI's Responses API: its request bodies as those of chats."""
