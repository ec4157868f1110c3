"""Simulate a hybrid model's cache: KV of full attention, and a few recurrent states."""
