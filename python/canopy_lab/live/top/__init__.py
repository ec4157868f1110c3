"""``canopy top``, ``ui`` and ``explain``: the status of running servers, in a terminal or a
browser."""
