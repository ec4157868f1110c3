"""Synthetic traces in the Bailian format, made to published statistics."""
