"""Requests, slots, admission, and the plan of each step. Pure: no clock, no event loop."""
