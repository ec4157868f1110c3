"""Find the documents in a prompt, order them, and parse their fields."""
