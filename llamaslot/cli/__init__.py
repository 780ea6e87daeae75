"""The command line: `llamaslot serve`, `chat` and `pull`."""
