"""What a tier below the device is: page metadata, subtree groups and their TTLs, the disk store."""
