"""Child processes: how they are started, spoken to, watched and restarted. What they run is in `llamaslot.app`."""
