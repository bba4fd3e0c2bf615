"""Invented runs for the page: usual ones, and one with every hostile text that a foreign file may contain."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from html.parser import HTMLParser
from typing import Any

import msgspec

from esbench.report.site import selection
from esbench.report.web.render import page
from esbench.schema import Case, Request, Row, Run, RunEnd, SchemeDoc, Variant
from tests import synthetic
from tests.report.ranking_cases import rows
from tests.report.report_cases import ROOT
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, peaks, skipped, time_row, variant, working

Record = dict[str, Any]

ALERT = "<script>window.planted = true</script>"
EVIL = f"</script>{ALERT}<img src=x onerror='window.planted=true'>\"'|`*[a](javascript:x)\u2028\U0001f680"
LONG = "n" * 200
OLD, NEW = "20260101T000000Z-quick-0001", "20260201T000000Z-quick-0002"

DOCS = {
    "LowRank": SchemeDoc(
        module="impls",
        text=f"""E_m = up_m @ down_m / sqrt(rank).

Both factors are normal: see :class:`~impls.schemes.dense.Perturbed`. {ALERT}

Memory    n * rank * (o + i)
          numbers.
Work      2 * rank * (o + i) flops.
""",
    )
}
"""The docstrings that :func:`usual` stores."""


def usual_run(run_id: str = NEW, slower: float = 1.0, device_name: str = "Test CPU") -> Run:
    """Return a run with a ranking on a square layer, a sweep of its forward, and a forward of a wider one."""
    cases = [linear(64, members=members) for members in (64, 256, 1024)]
    swept = [row for case in cases for row in forward_rows(case, slower * case.members / 1024)]
    lost = skipped(variant("Hadamard"), linear(512), "out of memory: 9 GB", "forward")
    measured_rows = [*rows(), *swept, *forward_rows(linear(512), slower * 20), lost]
    run = synthetic.run(measured_rows, peaks(), run_id=run_id, device_name=device_name)
    sources = {"LowRank(rank=1)": "arXiv:2511.16652"}
    return synthetic.changed(run, docs=DOCS, sources=sources)


def forward_rows(case: Case, milliseconds: float) -> list[Row]:
    """Return seven rounds of the forward of two schemes and both baselines, with their peaks."""
    factors = {BASE: 1.0, NAIVE: 40.0, DENSE: 8.0, variant("LowRank", rank=1): 1.5}
    result: list[Row] = []
    for timed_variant, factor in factors.items():
        times = [factor * milliseconds * (1 + round_ / 500) for round_ in range(7)]
        result.append(working(time_row(timed_variant, case, *times), 1e4, 1e4))
        result.append(bytes_row(timed_variant, case, "peak_bytes", int(1e6 * factor)))
    return result


def hostile_run() -> Run:
    """Return a run in which every name and reason is a text that could break a page."""
    case = msgspec.structs.replace(linear(), operator=f"Op{EVIL}")
    bad, long = Variant(scheme=f"S{EVIL}", options=(("o", EVIL),)), Variant(scheme=LONG)
    odd = time_row(long, case, 2.0)
    measured_rows: list[Row] = [
        time_row(BASE, case, 1.0),
        time_row(bad, case, 3.0),
        msgspec.structs.replace(odd, samples=((1e24,), (1e-300,)), labels=(EVIL,)),
        skipped(Variant(scheme="Reasoned"), case, EVIL),
        msgspec.structs.replace(odd, variant=Variant(scheme="Empty"), samples=()),
        msgspec.structs.replace(odd, metric=f"m{EVIL}", method=EVIL),
    ]
    run = synthetic.run(
        measured_rows, suite=f"suite{EVIL}", run_id="20250101T000000Z-evil", device_name=f"GPU{EVIL}"
    )
    end = RunEnd(status="failed", wall_s=1.0, invalid=(EVIL,))
    docs = {"Empty": SchemeDoc(module=EVIL, text=EVIL), LONG: SchemeDoc(module="", text="Work  none.")}
    return synthetic.changed(run, request=Request(cases=EVIL), docs=docs, end=end)


@cache
def committed_page() -> str:
    """Return the page of the committed runs."""
    return page(list(selection(ROOT / "results", ROOT / "reports").pages.values()))


class _Scripts(HTMLParser):
    """A parser that collects the scripts of a page, like a browser."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag == "script"
        if self._open:
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._open = self._open and tag != "script"

    def handle_data(self, data: str) -> None:
        if self._open:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def parsed(text: str) -> _Scripts:
    """Return a page parsed as HTML."""
    parser = _Scripts()
    parser.feed(text)
    return parser


def page_data(text: str) -> dict[str, Any]:
    """Return the data of a page."""
    (data,) = [body for attributes, body in parsed(text).scripts if attributes.get("id") == "data"]
    loaded: dict[str, Any] = json.loads(data)
    return loaded


def page_rows(data: Mapping[str, Any]) -> list[tuple[Record, Record, Record, str, Record]]:
    """Yield every row of a page's data: (run, quantity, case, variant's name, row)."""
    result = []
    for view in data["views"]:
        columns = data["columns"][view["columns"]]
        for number, marks, texts, *reasons in view["rows"]:
            remarks = reasons[0] if reasons else {}
            row = {"marks": marks, "texts": dict(zip(columns, texts, strict=False)), **remarks}
            keys = (
                data["runs"][view["run"]],
                data["quantities"][view["quantity"]],
                data["cases"][view["case"]],
            )
            result.append((*keys, data["variants"][number]["name"], row))
    return result
