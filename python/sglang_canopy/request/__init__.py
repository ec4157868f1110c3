"""Identify the sender of a request, and read and authorise its hints."""
