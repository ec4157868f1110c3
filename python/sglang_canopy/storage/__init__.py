"""Connection of the tree to the tiers below the host: the disk store and Mooncake."""
