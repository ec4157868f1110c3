"""Models small enough to be prepared from a package index, for the quick start and the tests."""
