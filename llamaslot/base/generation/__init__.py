"""Sampling parameters of requests, and probabilities of sampled tokens."""
