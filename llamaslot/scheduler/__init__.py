"""Requests, slots, admission, and the plan of each step; pure, no clock, no event loop."""
