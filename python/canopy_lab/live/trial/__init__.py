"""``canopy trial``: alternate two policies on one running server until the difference is
significant."""
