"""Numbers on the page have the same digits as in the tables."""

import random

import pytest

from esbench.report.analysis.pivot import grids
from esbench.report.tables.measured import section
from esbench.store import read_run
from esbench.units import format_number
from tests.browser.conftest import Open, script_section
from tests.report.report_cases import ROOT

COMMITTED = "results/amd-epyc/20261122T151454Z-quick-c095.jsonl.gz"
DIGITS = script_section("Numbers as text")
ODD = [
    (0.0, None),
    (0.125, 0.02),
    (0.375, 0.02),
    (25.0, 30.0),
    (35.0, 30.0),
    (-2.675, 0.03),
    (9.9999, 0.0001),
    (99.95, None),
    (999.5, None),
    (1.5e-7, None),
    (2e-9, 1e-9),
    (1.2345678e-7, 1e-12),
    (5e-8, 1.0),
    (123456789.0, 195.0),
    (123456789.0, 194.9),
    (1e15, 1e3),
    (1e24, None),
    (1.0, 1e-12),
    (0.0314, 0.0195),
    (0.04, 3.0),
]
"""Halves, which go to the even digit, what rounds up to another power of ten, very small and large ones."""

COLUMNS = {
    "Time (": "Time",
    "Time m": "vs. base",
    "Speed ": "vs. naive",
    "Peak m": "Peak",
    "Memory": "vs. base",
}
"""How the title of a table begins -> the heading of the page's column."""


def numbers(count: int) -> list[tuple[float, float | None]]:
    """Return numbers of any size, with half the width of their interval or without one."""
    draw = random.Random(8)  # noqa: S311  # no secret
    found: list[tuple[float, float | None]] = list(ODD)
    for _ in range(count):
        value = draw.choice([-1, 1, 1]) * draw.uniform(1, 10) * 10.0 ** draw.randint(-9, 14)
        digits = draw.choice([2, 3, 17])
        value = float(f"{value:.{digits}g}")
        known = draw.random() < 0.7  # most numbers have an interval
        found.append((value, abs(value) * 10.0 ** draw.uniform(-8, 1) if known else None))
    return found


def test_one_rule_for_digits(opened: Open) -> None:
    """The page formats any number with any interval like the tables, except for thousands separators."""
    told = numbers(4000)
    page = opened()
    script = f"(told) => {{ {DIGITS} return told.map((one) => numberText(...one)); }}"
    found = [text.replace(",", "") for text in page.evaluate(script, told)]
    expected = [format_number(*one) for one in told]
    wrong = [one for one in zip(told, found, expected, strict=True) if one[1] != one[2]]
    assert wrong == []


@pytest.mark.parametrize("metric", ["latency_ns", "peak_bytes"])
def test_figures_have_the_digits_of_the_tables(opened: Open, metric: str) -> None:
    """Each time, multiplier and peak of a committed run reads the same on the page as in its tables."""
    run, _ = read_run(ROOT / COMMITTED)
    assert run
    grid = next(grid for grid in grids(run, "Linear", metric) if grid.phase == "forward")
    case = grid.cases[-1]
    page = opened(
        [run],
        f"#operator=Linear&shape={case.shape}&members={case.members}&phase=forward"
        f"&metric={metric}/{grid.method}",
    )
    heads = page.locator("#table thead th").all_inner_texts()
    rows = [
        [cell.split("\n")[0] for cell in row.split("\t")]
        for row in page.locator("#table tbody tr").all_inner_texts()
    ]
    held = 0
    for block in section(grid).blocks:
        texts = dict(zip(block.table.labels, (row[-1] for row in block.table.texts()), strict=True))
        number = next(place for place, head in enumerate(heads) if head.startswith(COLUMNS[block.title[:6]]))
        found = {row[0]: row[number].replace(",", "") for row in rows if len(row) == len(heads)}
        assert found == {label: texts[label] for label in found}
        held += len(found)
    assert held > 20
