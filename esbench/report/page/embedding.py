"""The data of the page: runs as columns of numbers, what repeats written once.

Numbers are those of the tables, in the unit of their column and rounded to what their intervals support;
samples are not in it. Every block of figures belongs to a run, a quantity and a case, and names its variants:
so each figure can be traced to a run id and the rows of that key.
"""

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from esbench.documentation import Documentation
from esbench.report import captions
from esbench.report.analysis.run_selection import flaws
from esbench.report.page.figures import RATE, Figure, Panel, Quantity, panels
from esbench.report.page.numbers import Cell, columns, dumped, exactly, in_column, rounded
from esbench.report.tables.recommendation import expression
from esbench.report.text import one_line
from esbench.schema import Case, Run, Variant
from esbench.stats import Ratio
from esbench.units import quantity

FORMAT = 1
LONGEST = 400
"""Characters of a text that the page holds; more of a foreign run's name or reason is cut off."""

_TITLES = {RATE: "Effective members per ms"}
_PASSING = frozenset({"idle_w", "memory_bytes", "load", "foreign"})
"""Of an environment, what differs from one run to the next and tells no device or version."""


class Codes:
    """Values by number, each written once; what was added since a mark can be taken back."""

    def __init__(self) -> None:
        """Start empty."""
        self._numbers: dict[Hashable, int] = {}
        self._written: list[Any] = []

    def __len__(self) -> int:
        """How many there are."""
        return len(self._written)

    def of(self, key: Hashable, written: Callable[[], Any]) -> int:
        """The number of a value, by its key; ``written`` gives it as the page has it."""
        if key not in self._numbers:
            self._numbers[key] = len(self._written)
            self._written.append(written())
        return self._numbers[key]

    def written(self, start: int = 0) -> list[Any]:
        """What the page has of them, from a mark on."""
        return self._written[start:]

    def take_back(self, mark: int) -> None:
        """Forget what was added since there were so many."""
        for key in list(self._numbers)[mark:]:
            del self._numbers[key]
        del self._written[mark:]


@dataclass(frozen=True)
class Embedding:
    """The data of the page while runs are added to it.

    Attributes:
        known: what is said of schemes, by name: a variant whose source has changed since a run is told so.
        tables: what blocks refer to by number.
        runs: what was added.

    """

    known: Mapping[str, Documentation]
    tables: dict[str, Codes] = field(
        default_factory=lambda: {
            name: Codes() for name in ("variants", "cases", "quantities", "texts", "rosters", "environments")
        }
    )
    runs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, run: Run, *, thinned: bool = False, room: int) -> int | None:
        """Add a run; return how many bytes it takes, or ``None`` where there is no room, and it is not added.

        Args:
            run: with rows.
            thinned: without what only a newest run shows.
            room: in bytes.

        """
        marks = {name: len(codes) for name, codes in self.tables.items()}
        entry = self._run(run, thinned=thinned)
        entry["blocks"] = []
        size = len(dumped(entry))
        for panel in panels(run, thinned=thinned):
            if panel.figures:
                block = self._block(panel)
                entry["blocks"].append(block)
                size += len(dumped(block)) + 1
            if size > room:
                break
        size += sum(len(dumped(codes.written(marks[name]))) for name, codes in self.tables.items())
        if size > room:
            for name, codes in self.tables.items():
                codes.take_back(marks[name])
            return None
        self.runs.append(entry)
        return size

    @classmethod
    def like(cls, other: Self) -> Self:
        """A copy that can be added to by itself."""
        return cls(other.known, copy.deepcopy(other.tables), list(other.runs))

    def data(self) -> dict[str, Any]:
        """Everything that was added, as JSON has it."""
        return {
            "format": FORMAT,
            **{name: codes.written() for name, codes in self.tables.items()},
            "runs": self.runs,
        }

    def schemes(self) -> dict[str, None]:
        """The schemes of all variants that were added."""
        return dict.fromkeys(variant["scheme"] for variant in self.tables["variants"].written())

    def _run(self, run: Run, *, thinned: bool) -> dict[str, Any]:
        header = run.header
        facts = {
            name: value
            for name, value in msgspec.structs.asdict(header.environment).items()
            if name not in _PASSING and value is not None
        }
        facts["seed"] = header.seed
        return {
            "id": shown(header.run_id),
            "suite": shown(header.suite),
            "started": shown(header.started),
            "origin": shown(captions.origin(run)),
            "published": captions.is_published(run),
            "environment": self.tables["environments"].of(
                tuple(facts.items()), lambda: {name: _fact(value) for name, value in facts.items()}
            ),
            "flaws": [shown(flaw) for flaw in flaws(run)],
            "thinned": thinned,
            "changed": [] if thinned else self._changed(run),
        }

    def _changed(self, run: Run) -> list[int]:
        """The variants whose source is no longer what the run measured."""
        found = []
        for variant in dict.fromkeys(row.variant for row in run.rows):
            digest, here = run.header.code.get(variant.name), self.known.get(variant.scheme)
            if digest and here and not here.digest.startswith(digest):
                found.append(self._variant(variant))
        return found

    def _block(self, panel: Panel) -> list[Any]:
        """A panel: its quantity, its case, its variants, and a column for each kind of number."""
        roster = tuple(self._variant(one.variant) for one in panel.figures)
        return [
            self._quantity(panel.quantity),
            self._case(panel.case),
            self.tables["rosters"].of(roster, lambda: roster),
            columns([self._cells(panel.quantity, one) for one in panel.figures]),
        ]

    def _cells(self, what: Quantity, one: Figure) -> dict[str, Cell | str]:
        def column(value: float | None) -> float | None:
            return in_column(what.metric, value)

        if one.low is None and one.high is None and _is_count(what.metric, one.value):
            value, low, high = exactly(column(one.value)), None, None
        else:
            value, low, high = rounded(column(one.value), column(one.low), column(one.high))
        cells: dict[str, Cell | str] = {"m": value, "l": low, "h": high, "k": one.kind or None}
        cells["f"] = rounded(column(one.floor))[0]
        cells |= _ratio("s", one.speed) | _ratio("t", one.time)
        if one.work:
            cells |= {"w": exactly(one.work.flops), "b": exactly(one.work.moved_bytes)}
        if one.worth:
            cells["e"], cells["el"], cells["eh"] = rounded(one.worth.value, one.worth.low, one.worth.high)
        if one.kappa:
            cells["p"] = rounded(one.kappa.mean)[0]
        cells["r"], cells["n"] = self._text(one.reason), self._text(one.remark)
        return cells

    def _text(self, text: str) -> int | None:
        return self.tables["texts"].of(text, lambda: shown(text)) if text else None

    def _variant(self, variant: Variant) -> int:
        def written() -> dict[str, Any]:
            here = self.known.get(variant.scheme)
            return {
                "scheme": shown(variant.scheme),
                "options": shown(variant.name.removeprefix(variant.scheme)),
                "mode": variant.mode,
                "baseline": variant.baseline,
                "source": here.source(variant) if here else "",
                "code": expression(variant) if here and _trains(variant) else "",
            }

        return self.tables["variants"].of(msgspec.json.encode(variant), written)

    def _case(self, case: Case) -> int:
        def written() -> dict[str, Any]:
            usual = msgspec.structs.replace(case, members=1024, dtype="float32")
            return {
                "operator": shown(case.operator),
                "shape": shown(usual.label.removeprefix(case.operator)),
                "dtype": shown(case.dtype),
                "members": case.members,
                "sigma": case.sigma,
                "width": case.out_channels if case.out_channels == case.in_channels else None,
                "label": shown(case.label),
            }

        return self.tables["cases"].of(msgspec.json.encode(case), written)

    def _quantity(self, what: Quantity) -> int:
        def written() -> dict[str, str]:
            return {
                "phase": what.phase,
                "metric": shown(what.metric),
                "method": shown(what.method),
                "title": shown(_TITLES.get(what.metric) or captions.metric(what.metric)),
                "unit": quantity(what.metric).column.symbol,
            }

        return self.tables["quantities"].of(what, written)


def shown(text: str) -> str:
    """A foreign text as the page holds it: one line, and not too long."""
    line = one_line(text)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _trains(variant: Variant) -> bool:
    """Whether a person can train with it: baselines are there to be compared with."""
    return variant.mode == "batched" and not variant.baseline


def _is_count(metric: str, value: float | None) -> bool:
    """Whether a figure is bytes or a number of things, which are the same whenever they are counted."""
    return value is not None and (metric.endswith("_bytes") or value.is_integer())


def _ratio(name: str, ratio: Ratio | None) -> dict[str, Cell | str]:
    if ratio is None:
        return {}
    value, low, high = rounded(ratio.value, ratio.low, ratio.high)
    return {name: value, f"{name}l": low, f"{name}h": high}


def _fact(value: object) -> Cell | str:
    return value if isinstance(value, bool | int | float) else shown(str(value))
