"""From the body of a request that generates to its reply, whole or streamed: what all APIs have in common.

The packages beside this one, a package for each API, write the replies; none of them imports another.
"""
