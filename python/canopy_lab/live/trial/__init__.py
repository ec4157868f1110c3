"""``canopy trial``: two policies on one running server, in turns, until the difference is sure."""
