"""Learns reuse from past requests: return probability, gap, and new tokens of the next prompt."""
