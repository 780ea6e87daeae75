"""How tokens are sampled, and what is recorded about them."""
