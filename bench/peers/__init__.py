"""Compare llamaslot over HTTP with other servers, or with another version of itself, on the same workloads."""
