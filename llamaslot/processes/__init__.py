"""Child processes: start, messages, supervision, restart. Their main programs are in `llamaslot.app.runtime`."""
