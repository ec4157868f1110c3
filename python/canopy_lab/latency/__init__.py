"""TTFT and session times, targets on them, and the load that meets them."""
