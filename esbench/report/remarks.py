"""What must be said of the samples behind a table: footnotes in words, one for each kind of remark."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from esbench.report.grid import Grid, headings
from esbench.schema import Measurement
from esbench.stats import OFF_CLOCK, OUTLYING, median_clock, off_clock, outliers, throttled


class _Share(NamedTuple):
    """A share of a cell's samples or visits, and above which part of them it is worth a footnote."""

    kind: str
    of: str
    share: Callable[[Measurement], float]
    notable: float = 0.0


def remarks(grid: Grid) -> Iterator[str]:
    """Labels, budgets that ended the sampling, outliers, visits off clock: how many cells, and the worst.

    Samples are labelled here and dropped nowhere.
    """
    names = dict(zip(grid.cases, headings(grid.cases), strict=True))
    rows = {f"{v.label(grid.operator)} {names[case]}": row for v, case, row in grid.cells}
    said: dict[str, list[tuple[str, str]]] = {}
    for name, row in rows.items():
        for text in _words(row):
            # Labels carry counts of their own, budgets seconds: the words before them say which kind it is.
            said.setdefault(re.split(r"[:,]|\bof [\d.]", text)[0], []).append((name, text))
    for texts in said.values():
        name, text = texts[0]
        yield f"{text}: {len(texts)} of {len(rows)} cells, {'such as ' if len(texts) > 1 else ''}{name}"
    clock = median_clock(grid.run)
    for kind, of, share, notable in (
        _Share(f"outliers (modified z-score above {OUTLYING:g}), kept", "samples", outliers, 0.1),
        _Share(
            f"off the run's median clock by more than {_percent(OFF_CLOCK)}",
            "visits",
            lambda row: off_clock(row, clock),
        ),
        _Share("throttled", "visits", throttled),
    ):
        found = {name: value for name, row in rows.items() if (value := share(row)) > notable}
        if found:
            worst = max(found, key=lambda name: found[name])
            above = f"more than {_percent(notable)} of the {of}" if notable else of
            yield (
                f"{kind}: {above} in {len(found)} of {len(rows)} cells, "
                f"at most {_percent(found[worst])} in {worst}"
            )


def _words(row: Measurement) -> Iterator[str]:
    yield from row.labels
    if row.warm_up.startswith("not flat"):
        yield f"warm-up: {row.warm_up}"
    if row.stop.startswith("budget"):
        yield f"stopped by the {row.stop}"
    elif row.stop.startswith("one sample"):
        yield row.stop


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
