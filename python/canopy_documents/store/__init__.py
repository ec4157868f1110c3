"""Store the KV of chunks: in host memory and on disk."""
