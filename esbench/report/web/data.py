"""The data of the report page as plain JSON: runs, cases, variants, views with their rows, and answers.

Records refer to one another by position. The page computes no number: each text is that of a table, and the
numbers are there to be drawn and, in a comparison of two runs, divided.
"""

import math
import re
from collections import ChainMap
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from esbench.report import captions
from esbench.report.analysis.families import family
from esbench.report.analysis.pivot import operators
from esbench.report.analysis.run_selection import flaws
from esbench.report.tables.recommendation import expression
from esbench.report.web.answers import TASKS, Answer, answer, is_control
from esbench.report.web.views import RATE_METRIC, Row, View, better, metric_title, views
from esbench.schema import DENSE, Case, Run, SchemeDoc, Variant
from esbench.text import cut, one_line

MAX_TEXT = 400
"""Characters of a name or a reason in the page; a run from elsewhere may have longer ones."""
_DIGITS = 6
"""Significant digits of a number that is drawn."""
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=(?:Memory|Work|Quality)\s\s)")
"""The end of a paragraph: an empty line, or the end of a line before a closed form."""
_CLOSED = re.compile(r"(Memory|Work|Quality)\s\s+(.*)", re.DOTALL)
"""A paragraph of a scheme's docstring with a closed form."""
_REFERENCE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")
"""A cross-reference such as :class:`~impls.Perturbed`; its group is the last name."""
_TRANSIENT = {"idle_w", "memory_bytes", "load", "foreign"}
"""Fields of an environment that differ in every run."""

Record = dict[str, Any]


class _Records:
    """The records of some values, without duplicates; other records refer to them by their position."""

    def __init__(self, make_record: Callable[[Any], Any]) -> None:
        self._make_record = make_record
        self._positions: dict[bytes, int] = {}
        self.records: list[Any] = []

    def position(self, value: Hashable) -> int:
        """Return the position of a value's record, which is added if it is new."""
        key = msgspec.json.encode(value)  # as JSON: 1 == 1.0 in Python, but these options differ
        if key not in self._positions:
            self._positions[key] = len(self.records)
            self.records.append(self._make_record(value))
        return self._positions[key]


def page_data(runs: Sequence[Run], left_out: Iterable[str], trained_with: Callable[[Variant], str]) -> Record:
    """Return the data of a page; for the arguments see :func:`esbench.report.web.render.page`."""
    # Newest first. The start of published runs is unknown: they come last.
    shown = [run for run in runs if run.rows]
    shown.sort(key=lambda run: (not captions.is_published(run), run.header.run_id), reverse=True)
    sources = ChainMap(*(run.header.sources for run in shown))  # the newest run's first
    docs = ChainMap(*(run.header.docs for run in shown))
    variants = _Records(lambda variant: _variant(variant, sources, docs))
    cases, quantities, columns = _Records(_case), _Records(_quantity), _Records(list)
    all_views: list[tuple[int, View]] = []  # each with the position of its run
    answers: list[Record] = []
    for run_index, run in enumerate(shown):
        for views_of_case in _by_case(run, shown):
            first = len(all_views)
            answers.append(_answer(answer(views_of_case, trained_with), first, variants.position))
            all_views += [(run_index, view) for view in views_of_case]
    return {
        "runs": [_run(run) for run in shown],
        "views": [
            {
                "run": run_index,
                "case": cases.position(view.case),
                "quantity": quantities.position((view.phase, view.metric, view.method)),
                "columns": columns.position(view.columns),
                "shown": view.shown,
                "rows": [_row(variants.position(row.variant), row) for row in view.rows],
            }
            for run_index, view in all_views
        ],
        "answers": answers,
        "start": _start_view(shown, all_views),
        "cases": cases.records,
        "quantities": quantities.records,
        "columns": columns.records,
        "variants": variants.records,
        "schemes": {name: _scheme(doc) for name, doc in sorted(docs.items())},
        "left_out": [short(line) for line in left_out],
    }


def _by_case(run: Run, history: Sequence[Run]) -> Iterator[list[View]]:
    """Yield the views of a run, those of one case at a time."""
    for operator in operators(run):
        by_case: dict[Case, list[View]] = {}
        for view in views(run, operator, history):
            by_case.setdefault(view.case, []).append(view)
        yield from by_case.values()


def short(text: str) -> str:
    """Return a text on one line, cut off after :data:`MAX_TEXT` characters."""
    return cut(one_line(text), MAX_TEXT)


def _run(run: Run) -> Record:
    header = run.header
    facts = msgspec.structs.asdict(header.environment) | {"seed": header.seed}
    return {
        "id": short(header.run_id),
        "suite": short(header.suite),
        "device": short(captions.device(run))
        + (", published by others" if captions.is_published(run) else ""),
        "published": captions.is_published(run),
        "started": short(header.started),
        "origin": short(captions.origin(run)),
        "flaws": [short(flaw) for flaw in flaws(run)],
        "environment": {
            name: value if isinstance(value, bool | int | float) else short(str(value))
            for name, value in facts.items()
            if name not in _TRANSIENT and value is not None
        },
    }


def _case(case: Case) -> Record:
    task = TASKS.get(case.operator)
    usual = msgspec.structs.replace(case, dtype="float32")  # whose caption names no dtype
    return {
        "group": task.group if task else short(case.operator),
        "layer": short(captions.layer(usual)),
        "members": case.members,
        "dtype": short(case.dtype),
        "sigma": case.sigma,
        "label": short(case.label),
        "task": bool(task),
    }


def _variant(variant: Variant, sources: "ChainMap[str, str]", docs: "ChainMap[str, SchemeDoc]") -> Record:
    role = "baseline" if variant.baseline else "control" if is_control(variant) else "scheme"
    doc = docs.get(variant.scheme)
    can_train = role == "scheme" and doc is not None and not doc.module.startswith("impls.benchmark")
    return {
        "name": short(variant.name),
        "scheme": short(variant.unfused_scheme),
        "documented": short(variant.scheme),
        "role": "dense" if variant.name == DENSE else role,
        "family": family(variant.scheme),
        "source": short(sources.get(variant.name, "")),
        "code": expression(variant) if can_train else "",
    }


def _scheme(doc: SchemeDoc) -> Record:
    """Return a scheme's docstring in parts: the formula, other paragraphs, and memory, work and quality.

    Memory, work and quality are closed forms. A docstring that begins with a reference to a scheme is that of
    a faster implementation: ``of`` is the scheme's name.
    """
    reference = _REFERENCE.match(doc.text)
    parts = _PARAGRAPH.split(_REFERENCE.sub(r"\1", doc.text).replace("``", ""))
    closed = {form[1]: one_line(form[2]) for part in parts if (form := _CLOSED.fullmatch(part))}
    paragraphs = [one_line(part) for part in parts if not _CLOSED.fullmatch(part)]
    return {
        "module": doc.module,
        "summary": "".join(paragraphs[:1]),
        "text": paragraphs[1:],
        "closed": closed,
        "of": reference[1] if reference else "",
    }


def _quantity(key: tuple[str, str, str]) -> Record:
    phase, metric, method = key
    return {
        "phase": phase,
        "metric": short(metric),
        "method": short(method),
        "title": short(metric_title(metric)),
        "better": better(metric),
    }


def _answer(answer: Answer, first: int, position: Callable[[Variant], int]) -> Record:
    return {
        "view": first + answer.view,
        "lead": answer.lead,
        "best": [position(variant) for variant in answer.best],
        "picks": [
            {"variant": position(pick.variant), "figures": pick.figures, "why": pick.why}
            for pick in answer.picks
        ],
        "notes": [short(note) for note in answer.notes],
    }


def _start_view(runs: Sequence[Run], views: Sequence[tuple[int, View]]) -> int:
    """Return the index of the view that the page opens with.

    In order of priority: a ranking, with dense noise, of a run without flaws, of a Linear layer, with the
    most members.
    """

    def key(index: int) -> tuple[bool, bool, bool, bool, int, int]:
        run_index, view = views[index]
        is_ranking = view.metric == RATE_METRIC
        has_dense_noise = any(row.variant.name == DENSE and row.is_known for row in view.rows)
        has_no_flaws = not any(flaws(runs[run_index]))
        is_linear = view.case.operator == "Linear"
        return is_ranking, has_dense_noise, has_no_flaws, is_linear, view.case.members, -index

    return max(range(len(views)), key=key, default=0)


def _row(position: int, row: Row) -> list[Any]:
    """Return a row as ``[variant, [value, low, high, evaluated], texts, remarks if any]``."""
    remarks = {"kind": row.kind, "reason": short(row.reason), "remark": short(row.remark)}
    remarks = {name: text for name, text in remarks.items() if text}
    marks = [_number(mark) for mark in row.marks]
    # The page has thousands of rows: leave out the empty end of the list.
    while marks and marks[-1] is None:
        marks.pop()
    return [position, marks, list(row.texts), *([remarks] if remarks else [])]


def _number(value: float | None) -> float | None:
    """Return a finite number, rounded to :data:`_DIGITS` digits unless it is whole."""
    if value is None or not math.isfinite(value):
        return None
    is_whole = float(value).is_integer() and abs(value) < 2**53
    return int(value) if is_whole else float(f"{value:.{_DIGITS}g}")
