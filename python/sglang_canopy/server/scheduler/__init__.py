"""Runs in each rank's scheduler: builds the cache, receives requests, orders and admits them."""
