"""Canopy's code in each process of a server."""
