"""``canopy top``, ``ui`` and ``explain``: what running servers say of themselves, in a terminal or a browser."""
