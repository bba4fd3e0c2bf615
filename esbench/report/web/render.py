"""The report page as one HTML file: template, style, script and data."""

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from esbench.errors import UserError
from esbench.report.web.data import page_data
from esbench.schema import Run
from esbench.scheme_docs import Documentation, documentations
from esbench.studies.compiled_kernels import Compilations, read_compilations

PAGE = "index.html"


def render_page(runs: Sequence[Run], results: Path, out: Path) -> list[Path]:
    """Write ``<out>/index.html``; nothing if no run has a row.

    The same runs and the same sources of variants give the same bytes.

    Args:
        runs: the runs to show, measured and published ones.
        results: the folder of results, which may hold a study of compiled kernels.
        out: the folder to write to.

    """
    try:
        compilations = read_compilations(results)
    except UserError:
        compilations = None  # the kernels page reports the error
    text = page(runs, documentations(), compilations)
    if not text:
        return []
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    path.write_text(text, encoding="utf-8", newline="\n")
    return [path]


def page(
    runs: Sequence[Run], known: Mapping[str, Documentation], compilations: Compilations | None = None
) -> str:
    """Return the page as text; empty if no run has a row.

    Args:
        runs: the runs to show, measured and published ones.
        known: the documentation of their schemes, by name.
        compilations: what kernels compile to, if that was studied.

    """
    data = page_data(runs, known)
    if not data["runs"]:
        return ""
    schemes = {one["scheme"]: known[one["scheme"]] for one in data["variants"] if one["scheme"] in known}
    schemes |= {one.of: known[one.of] for one in list(schemes.values()) if one.of in known}
    data["schemes"] = {name: _scheme(one, compilations) for name, one in sorted(schemes.items())}
    style, script = read("style.css"), f"(() => {{\n{read('app.js')}}})();\n"
    environment = Environment(
        loader=PackageLoader("esbench.report.web", ""), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("index.html.j2").render(
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}",
        style=Markup(style),  # noqa: S704  our own file, without text from any run
        script=Markup(script),  # noqa: S704  the same
        data=Markup(as_json(data)),  # noqa: S704  JSON in which every character of a tag is escaped
        count=len(data["runs"]),
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


def _scheme(known: Documentation, compilations: Compilations | None) -> dict[str, Any]:
    return {
        "module": known.module,
        "file": known.file,
        "summary": known.summary,
        "text": known.text,
        "closed": known.closed,
        "of": known.of,
        "kernels": _kernels(known.kernels, compilations),
    }


def _kernels(names: Collection[str], compilations: Compilations | None) -> list[list[Any]]:
    """What some kernels compile to, one row per launch and capability."""
    return [
        [
            one.title,
            f"{one.capability / 10:.1f}",
            one.warps,
            one.stages,
            one.registers,
            one.shared_bytes,
            one.spilled_bytes,
            one.instructions.get("all"),
        ]
        for one in (compilations.found if compilations else ())
        if one.kernel in names
    ]


def _digest(text: str) -> str:
    """The source expression by which the page's content security policy allows a text and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
