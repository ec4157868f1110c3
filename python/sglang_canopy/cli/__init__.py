"""The ``canopy`` command."""
