"""The report page as one HTML file: template, style, script and data."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from esbench.report.web.data import page_data
from esbench.schema import Run, Variant


def page(
    runs: Sequence[Run],
    left_out: Iterable[str] = (),
    trained_with: Callable[[Variant], str] = lambda _: "not tried",
) -> str:
    """Return the page; without runs it says that there is nothing to show. The same runs give the same text.

    Args:
        runs: the runs to show, measured and published ones.
        left_out: sentences that say which stored runs are not shown.
        trained_with: returns the accuracies of networks trained with a variant, in % of dense noise's.
    """
    style, script = read("style.css"), f"(() => {{\n{read('app.js')}}})();\n"
    environment = Environment(
        loader=PackageLoader("esbench.report.web", ""), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("index.html.j2").render(
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}",
        style=Markup(style),  # noqa: S704  our own file, without text from any run
        script=Markup(script),  # noqa: S704  the same
        data=Markup(as_json(page_data(runs, left_out, trained_with))),  # noqa: S704  JSON with every character of a tag escaped
    )


def as_json(value: object) -> str:
    """Return JSON that is safe inside a script element: no tags, and no line ends of JavaScript.

    Raises:
        ValueError: the value contains a number that is not finite.
    """

    def compact(value: Any, **options: Any) -> str:  # noqa: ANN401  anything that JSON can hold
        return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False, **options)

    return str(htmlsafe_json_dumps(value, dumps=compact))


def read(name: str) -> str:
    """Read a file of the page."""
    return (resources.files("esbench.report.web") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return the expression of a content security policy that allows exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
