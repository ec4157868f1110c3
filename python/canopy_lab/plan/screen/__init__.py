"""Predict configurations without simulating them, and say which need no simulation."""
