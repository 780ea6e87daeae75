"""Anthropic's Messages API: replies, events and errors."""
