"""The adaptive ratio (CacheTune, Algorithm 1): measured through a running server, saved and
used."""
