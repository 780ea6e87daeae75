"""Plain values of a request: sampling, log-probabilities, tools, reasoning, remembered replies, responses;
and the shares of owners in what is kept of them.
"""
