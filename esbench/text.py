"""Escaping and shortening of text for one line, a terminal, Markdown and file names."""

import difflib
import hashlib
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

COLUMNS = 100
"""The longest line where there is no terminal."""
_LONGEST_FILE = 80
_HASH_DIGITS = 8
_LISTED = 3
_FEW = 5
_FOOTNOTE_MARK = re.compile(r"(\[\d+\](?![\[(:]))")
"""``[1]``, unless a link or a reference begins with it."""
_COMMAND = re.compile(r"`[^`\n]+`")
_MARKUP = re.compile(r"[\\|`*<>\[\]!#~@]|\b_|_\b|(?<=\w):(?=//)|(?<=www)\.", re.IGNORECASE)


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun: ``2 rounds``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """Return a text on one line: line breaks and unprintable characters become spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def printable(text: str) -> str:
    """Return a text for a terminal: control characters except line breaks become spaces."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def cut(line: str, width: int = COLUMNS) -> str:
    """Return a line of at most this many characters, the last of which is ``…`` if it was longer."""
    return line if len(line) <= width else f"{line[: max(width - 1, 0)]}…"


def fill(text: str, indent: str = "  ") -> str:
    """Return a text in lines of at most COLUMNS characters, unless a word or a `command` is longer."""
    # textwrap breaks lines at spaces, so those within commands are replaced meanwhile.
    unbroken_commands = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), text)
    lines = textwrap.fill(
        unbroken_commands, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\0", " ")


def short_path(path: Path) -> str:
    """Return a path, relative to the working directory if it is inside."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def first_names(names: Sequence[str]) -> str:
    """Return the first few names, and the number of others: ``a, b, c and 2 more``."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def suggest(name: str, known: Sequence[str], listing: str) -> str:
    """Return the end of an error message about an unknown name: all known names, or the three closest.

    ``listing`` is a command that prints all names.
    """
    if len(known) <= _FEW:
        return f"available: {', '.join(known)}"
    closest = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"closest: {', '.join(closest)}; `{listing}` lists all"


def escape(text: str) -> str:
    """Return a text escaped for Markdown: no link, image, tag, heading or emphasis.

    Parentheses, underscores inside words and footnote marks such as ``[1]`` have no meaning and stay.
    """
    parts = _FOOTNOTE_MARK.split(one_line(text))  # text and footnote marks in turn
    parts[::2] = [_MARKUP.sub(lambda markup: f"\\{markup[0]}", part) for part in parts[::2]]
    return "".join(parts)


def file_name(words: str) -> str:
    """Return a file name in lower case, with dashes instead of other characters."""
    return short_file_name(re.sub(r"[^a-z0-9_]+", "-", words.lower()).strip("-") or "unnamed")


def short_file_name(name: str) -> str:
    """Return a name short enough for every file system; a hash of the name replaces the rest."""
    if len(name) <= _LONGEST_FILE:
        return name
    digits = hashlib.sha256(name.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{name[: _LONGEST_FILE - _HASH_DIGITS - 1]}-{digits}"
