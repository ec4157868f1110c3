"""What policies learn from past requests: who returns, when, and with how many new tokens."""
