"""How the tree reaches the tiers below the host: the disk store and Mooncake."""
