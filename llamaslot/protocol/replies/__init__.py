"""Replies that a conversation contains again: found by their meaning, and put into its prompt as tokens."""
