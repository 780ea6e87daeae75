"""The demo model and its card, as package data."""
