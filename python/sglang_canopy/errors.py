"""The exception class for users' mistakes."""


class CanopyError(ValueError):
    """A user's mistake. The message names the given value, the allowed values and the remedy. The
    command line prints it as one line and exits with status 2. A server stops with it."""
