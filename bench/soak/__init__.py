"""A soak: hours of mixed requests to one server, whose memory, descriptors and latency must not grow."""
