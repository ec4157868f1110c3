"""The simulator compiled to machine code, where a user has asked for it (``canopy compile``)."""
