"""Automatic hints for agents, derived from the traffic of their client library."""
