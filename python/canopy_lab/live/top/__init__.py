"""``canopy top``, ``ui`` and ``explain``: status of running servers in terminal or browser."""
