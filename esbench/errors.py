"""The error that a user can fix, and one-line messages of any exception."""

from esbench.text import cut, one_line

LONGEST = 1000
"""The largest number of characters of a message; longer ones are cut."""


class UserError(ValueError):
    """Wrong usage, or something is missing on this machine.

    The message is one line that says what to do; the command line prints it without a traceback
    and ends with exit code 2.
    """


def message_of(error: BaseException) -> str:
    """Return the message of an exception on one line; empty if ``str`` of the exception raises."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # the class of a variant's error may raise anything
        return ""
    return message_line(text)


def message_line(text: str) -> str:
    """Return a text as a message that can be stored: one printable line of at most LONGEST characters."""
    # A lone surrogate cannot be encoded in UTF-8.
    text = text[: 2 * LONGEST].encode("utf-8", "replace").decode()
    return cut(one_line(text), LONGEST)
