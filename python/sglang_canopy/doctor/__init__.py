"""Say before a start what of a server's set-up is refused or untested, and what the machine lacks."""
