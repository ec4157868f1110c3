"""The what-if meter: what other policies and capacities would hit on a running server's requests."""
