"""Errors that the user can fix."""


class UserError(ValueError):
    """Wrong usage or an environment that lacks something.

    The message is one line that says what to do; the command line prints it without a traceback
    and ends with exit code 2.
    """
