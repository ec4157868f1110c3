"""The ``canopy`` command, one file a subcommand."""
