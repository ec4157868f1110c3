"""Tools that talk to a running server."""
