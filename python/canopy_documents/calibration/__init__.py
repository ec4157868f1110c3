"""The adaptive ratio (CacheTune, Algorithm 1): measured on a running server, saved, and loaded."""
