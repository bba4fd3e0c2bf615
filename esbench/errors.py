"""Errors that the user can fix, and the messages of all others."""

LONGEST = 1000
"""The most characters of a message that are stored."""


class UserError(ValueError):
    """Wrong usage or an environment that lacks something.

    The message is one line that says what to do; the command line prints it without a traceback
    and ends with exit code 2.
    """


def message_of(error: BaseException) -> str:
    """Return the message of an exception on one line, cut to a length; empty if it cannot be read."""
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001  # the class of a variant's error may raise anything
        return ""
    # A lone surrogate cannot be stored.
    text = text[: 2 * LONGEST].encode("utf-8", "replace").decode()
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
