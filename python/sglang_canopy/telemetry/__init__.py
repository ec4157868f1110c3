"""What a server counts and shows: counters, status, metrics, and `canopy top`."""
