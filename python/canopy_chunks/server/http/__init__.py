"""Documents on their way in: the HTTP process finds, tokenises, bounds and registers them."""
