"""Find what breaks a log's shared prefixes: the kind, the tokens it costs and the cure."""
