"""Simulate cache policies on traces, without a server."""
