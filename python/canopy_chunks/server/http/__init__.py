"""Documents in the HTTP process: finds, tokenises, bounds and registers them."""
