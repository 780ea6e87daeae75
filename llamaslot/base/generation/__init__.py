"""Plain values of a request: sampling, log-probabilities, tools, reasoning, remembered replies, responses;
and the shares of clients in what is kept of them.
"""
