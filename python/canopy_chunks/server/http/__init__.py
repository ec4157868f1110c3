"""Documents in the HTTP process: found, tokenised, bounded and registered."""
