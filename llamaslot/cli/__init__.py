"""The command line: `llamaslot serve`, `chat`, `cache`, `pull`, `doctor` and `completion`."""
