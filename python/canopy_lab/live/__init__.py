"""Tools for running servers."""
