"""``canopy page``: a running server's page in this machine's browser."""
