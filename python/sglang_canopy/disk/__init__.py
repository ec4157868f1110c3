"""The disk store: pages of KV in files, bounded, and correct or absent after a crash."""
