"""From a log of requests to what a cache policy, hints and memory would win on it."""
