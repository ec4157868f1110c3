"""The one exception class for mistakes a user can make."""


class CanopyError(ValueError):
    """A user's mistake. The message says what was given, what is allowed and what to do.

    The command line prints it as one line and exits with status 2; the server stops with it.
    """
