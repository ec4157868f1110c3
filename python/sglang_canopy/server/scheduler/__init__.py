"""Runs in each rank's scheduler: build the cache, receive requests, order and admit them."""
