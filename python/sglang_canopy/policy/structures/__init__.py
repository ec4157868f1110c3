"""Queues and heaps of leaves, for policies."""
