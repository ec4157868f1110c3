"""Find the documents in a prompt and compute the keys of their chunks."""
