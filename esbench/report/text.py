"""Words of a foreign run where they are shown: they stay one line, and stay words."""

import hashlib
import re
from collections.abc import Sequence

_LONGEST = 60
_LONGEST_FILE = 80
_DIGITS = 8
_LISTED = 3
_MARK = re.compile(r"(\[\d+\](?![\[(:]))")
_MARKUP = re.compile(r"[\\|`*<>\[\]!#~@]|\b_|_\b|(?<=\w):(?=//)|(?<=www)\.", re.IGNORECASE)


def counted(number: int, noun: str) -> str:
    """So many of something."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def one_line(text: str) -> str:
    """A text as it can stand in a line: line breaks and what no font prints become a space."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def label(text: str) -> str:
    """A text as a picture has room for it."""
    line = one_line(text)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def escape(text: str) -> str:
    """A text that GitHub renders as it is: no link, picture, tag, heading or emphasis in it is live.

    A parenthesis, an underscore inside a word and a footnote mark, ``[1]``, mean nothing by themselves,
    and stay readable in the source.
    """
    parts = _MARK.split(one_line(text))
    return "".join(
        part if place % 2 else _MARKUP.sub(lambda found: f"\\{found[0]}", part)
        for place, part in enumerate(parts)
    )


def file_name(words: str) -> str:
    """Lower case and dashes: a foreign run must not choose where files are written."""
    return cut(re.sub(r"[^a-z0-9_]+", "-", words.lower()).strip("-") or "unnamed")


def cut(name: str) -> str:
    """A name that every file system takes; what is cut off stays in it as a hash."""
    if len(name) <= _LONGEST_FILE:
        return name
    digits = hashlib.sha256(name.encode()).hexdigest()[:_DIGITS]
    return f"{name[: _LONGEST_FILE - _DIGITS - 1]}-{digits}"
