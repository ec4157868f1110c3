"""``canopy trial``: alternate two policies on one server until the difference is significant."""
