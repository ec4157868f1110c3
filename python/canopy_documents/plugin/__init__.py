"""Entry point of document reuse in a server: its flag, hooks, refusals, series and usage."""
