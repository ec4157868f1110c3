"""What-if meter: estimated hits of other policies and capacities on a running server's requests."""
