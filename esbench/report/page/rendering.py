"""The page written: one file that holds its data, its style and its scripts, and needs no network."""

import base64
import hashlib
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from esbench.documentation import Documentation, documentations
from esbench.errors import UserError
from esbench.report.page.choice import RULE, contents
from esbench.report.page.numbers import dumped
from esbench.schema import Run
from esbench.studies.compiled_kernels import Compilations, read_compilations

PAGE = "index.html"
TEMPLATE, STYLE = "index.html.j2", "style.css"
SCRIPTS = (
    "data",
    "digits",
    "elements",
    "choice",
    "figures",
    "headline",
    "table",
    "scales",
    "bars",
    "pareto",
    "sweep",
    "detail",
    "comparison",
    "page",
)
"""In the order in which they stand in the page: one function around all of them is their scope."""


def render_page(runs: Sequence[Run], results: Path, out: Path, *, unread: int = 0) -> list[Path]:
    """Write ``<out>/index.html`` from measured and published runs; nothing where no run has a row.

    The same results, and the same sources of variants, give the same bytes. ``unread`` is how many older runs
    there are that nobody read.
    """
    try:
        compilations = read_compilations(results)
    except UserError:
        compilations = None  # the page on kernels says why
    text = page(runs, documentations(), compilations, unread=unread)
    if not text:
        return []
    out.mkdir(parents=True, exist_ok=True)
    path = out / PAGE
    path.write_text(text, encoding="utf-8", newline="\n")
    return [path]


def page(
    runs: Sequence[Run],
    known: Mapping[str, Documentation],
    compilations: Compilations | None = None,
    *,
    unread: int = 0,
) -> str:
    """The page as text, empty where no run has a row.

    Args:
        runs: measured and published ones, in any order.
        known: what is said of their schemes, by name.
        compilations: what kernels compile to, where somebody looked.
        unread: how many older runs there are that nobody read.

    """
    found = contents(runs, known, unread=unread)
    if not found.embedding.runs:
        return ""
    schemes = {name: known[name] for name in found.embedding.schemes() if name in known}
    schemes |= {one.of: known[one.of] for one in list(schemes.values()) if one.of in known}
    data = {
        **found.embedding.data(),
        "schemes": {name: _scheme(one, compilations) for name, one in sorted(schemes.items())},
        "contents": found.words,
        "rule": RULE if found.thinned or found.left_out else "",
    }
    style, script = read(STYLE), _script()
    environment = Environment(
        loader=PackageLoader("esbench.report.page", ""), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(TEMPLATE).render(
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}",
        style=Markup(style),  # noqa: S704  our own file: no run has a word in it
        script=Markup(script),  # noqa: S704  the same
        data=Markup(dumped(data)),  # noqa: S704  JSON in which every character of a tag is escaped
        contents=found.words,
    )


def _scheme(known: Documentation, compilations: Compilations | None) -> dict[str, Any]:
    """What the page says of a scheme."""
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
    """What some kernels compile to: a row for each launch and capability."""
    if compilations is None:
        return []
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
        for one in compilations.found
        if one.kernel in names
    ]


def _script() -> str:
    """All scripts as one, in a scope of their own."""
    parts = [read(f"scripts/{name}.js") for name in SCRIPTS]
    return "(() => {\n" + "\n".join(['"use strict";', *parts]) + "})();\n"


def read(name: str) -> str:
    """A file of the page, by its name."""
    return (resources.files("esbench.report.page") / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """What a policy allows a text by: a browser runs this one, and no other that somebody smuggled in."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
