"""The queues and heaps that policies keep their leaves in."""
