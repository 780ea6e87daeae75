"""Plain values of a request: its context, sampling, log-probabilities, tools, reasoning, options of its reply."""
