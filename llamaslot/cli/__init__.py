"""The command line: `llamaslot serve`, `chat`, `cache` and `pull`."""
