"""How long a tier keeps what: groups of prefix subtrees, their reuse, and the TTL of each."""
