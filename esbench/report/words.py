"""Words of a foreign run where they are shown: they stay one line, and stay words."""

import re
from collections.abc import Sequence

_LONGEST = 60
_LISTED = 3
_MARK = re.compile(r"(\[\d+\](?![\[(:]))")
_MARKUP = re.compile(r"[\\|`*<>\[\]!#~@]|\b_|_\b|(?<=\w):(?=//)|(?<=www)\.", re.IGNORECASE)


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
