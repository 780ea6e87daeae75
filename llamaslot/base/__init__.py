"""Errors and the messages that service and engine exchange; imports nothing of this project."""
