"""Plain values of a request: sampling, log-probabilities, tools, reasoning."""
