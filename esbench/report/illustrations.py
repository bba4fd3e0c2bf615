"""Pictures where a page shows them: the README's and those of the reports."""

import html
import re
from pathlib import Path

from esbench.errors import UserError
from esbench.report.words import one_line
from esbench.store import run_name

WIDTH = 900
"""Pixels on a page; a vector graphic is sharp at any width."""

_WORDS = re.compile(r"<dc:(title|description)>(.*?)</dc:\1>", re.DOTALL)


def image(source: str, alternative: str, width: int = WIDTH) -> str:
    """An image as GitHub renders it, as wide as its page has room for; the picture is a card of its own."""
    return f'<img src="{html.escape(source)}" alt="{html.escape(one_line(alternative))}" width="{width}">'


def illustration(page: str, file: str, run: str = "", width: int = WIDTH) -> str:
    """What a page's cog block writes to show a picture: ``cog.out(illustration(cog.inFile, file))``.

    The alternative text is the title that the picture has, and where its figures come from.

    Args:
        page: the file of the page.
        file: an SVG file that `esbench report` or `esbench plot` wrote, relative to the page's folder.
        run: the id of a run, or its file: the picture must be drawn from it.
        width: in pixels.

    Raises:
        UserError: there is no such picture, or it is one of another run.

    """
    try:
        text = (Path(page).parent / file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"{file}: {error}: write it with `esbench report` or `esbench plot`"
        raise UserError(one_line(message)) from error
    words = {name: html.unescape(said) for name, said in _WORDS.findall(text)}
    if "title" not in words:
        message = f"{file} does not say what it shows: write it with `esbench report` or `esbench plot`"
        raise UserError(message)
    origin, run_id = words.get("description", ""), run_name(Path(run))
    if run_id and run_id not in origin:
        message = f"{file} is no picture of run {run_id}, but of: {origin or 'an unknown run'}"
        raise UserError(one_line(message))
    alternative = " - ".join(filter(None, [words["title"], origin]))
    return f"\n{image(file, alternative, width)}\n"
