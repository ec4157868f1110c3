"""The ``canopy`` command, one file per subcommand."""
