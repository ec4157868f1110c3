"""The disk store: pages of KV in files, bounded, and right or absent after a crash."""
