"""Learn TTLs for prefix groups and categories from a trace (Kareto, Algorithm 2)."""
