"""What ``canopy top`` shows: a server's tiers, live in a terminal."""
