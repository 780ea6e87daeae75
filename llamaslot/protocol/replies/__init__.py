"""Replies that clients send back: found by their meaning, and put into the prompt as the generated tokens."""
