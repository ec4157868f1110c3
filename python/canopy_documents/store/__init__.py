"""Store the KV of chunks: on the device, in host memory and on disk."""
