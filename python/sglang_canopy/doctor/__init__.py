"""Check a server's set-up before a start: refused and untested features, and faults of the machine."""
