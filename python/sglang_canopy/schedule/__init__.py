"""The order of the waiting queue: what a request costs in seconds, whose turn it is, who is next."""
