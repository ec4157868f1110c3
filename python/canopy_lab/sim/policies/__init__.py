"""Policies that the simulator compares with, and no server runs. ``policy/registry.py`` names them."""
