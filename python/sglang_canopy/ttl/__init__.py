"""TTLs of a tier, by group of prefix subtrees and by category."""
