"""Values of the README and the reports, traced back to the samples that they are computed from.

The tests recompute values from the JSON of the runs' files, with formulas written out in this file.
"""

import gzip
import json
import math
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from scipy.stats import t as student

from esbench.git import git
from esbench.report.analysis.peers import SCANNED
from esbench.report.readme import render
from esbench.report.site import all_sections, selection
from esbench.report.tables.table import (
    EFFECTIVE_PERCENT,
    MEMORY_MULTIPLIER,
    RATE_MULTIPLIER,
    RATE_PER_MS,
    SPEED_MULTIPLIER,
    TIME_MULTIPLIER,
    Cell,
    CellNumber,
    Table,
)
from esbench.schema import Case, Measurement, Variant
from esbench.store import read_run

pytestmark = pytest.mark.xdist_group("traces")  # one worker makes what these tests share

ROOT = Path(__file__).parents[2]


SAMPLED, SEED = 50, 7
Raw = Mapping[str, Any]
Formula = Callable[[Sequence[Raw]], list[float]]


class PrintedValue(NamedTuple):
    """A printed value: its page, its table and the row in it, its cell, and the number."""

    page: str
    table: Table
    row: int
    cell: Cell
    reading: CellNumber


def printed_values(page: str, tables: Iterable[Table]) -> Iterator[PrintedValue]:
    """Yield all values of some tables."""
    for table in tables:
        for index, row in enumerate(table.cells):
            for cell in row:
                for reading in cell.numbers:
                    if reading.value is not None:
                        yield PrintedValue(page, table, index, cell, reading)


read_once = cache(read_run)


def tables_of(page: Path) -> list[Table]:
    """Return the tables that the cog blocks of a page print."""
    printed: list[Table] = []
    markdown = Table.markdown

    def record(table: Table, *, intervals: bool = False) -> str:
        printed.append(table)
        return markdown(table, intervals=intervals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Table, "markdown", record)
        patch.setattr("esbench.report.readme.read_run", read_once)
        render(page, check=True)
    return printed


@cache
def all_values() -> tuple[PrintedValue, ...]:
    """Return all values of the README and docs, and of the tables of all committed runs that are shown."""
    result: list[PrintedValue] = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        result += printed_values(path.relative_to(ROOT).as_posix(), tables_of(path))
    with tempfile.TemporaryDirectory() as copy:  # without the runs that `nox -s bench` has added
        for name in git(ROOT, "ls-files", "results").splitlines():
            (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(copy) / name)
        pages = selection(Path(copy) / "results", ROOT / "reports").pages
    for folder, run in pages.items():
        page = str((folder / "tables.md").relative_to(ROOT))
        blocks = (block for section in all_sections(run) for block in section.blocks)
        result += printed_values(page, (block.table for block in blocks))
    return tuple(result)


def sampled_values() -> list[PrintedValue]:
    """Return values of as many kinds as there are, half from the README and docs, half from the reports.

    Rooflines and published values are left out: other tests compute them. So are values that a cell names in
    words, such as "more than dense".
    """
    chosen: list[PrintedValue] = []
    for is_readme in (True, False):
        by_name: dict[str, list[PrintedValue]] = {}
        for printed in all_values():
            rows = printed.reading.rows
            is_other = printed.reading.name == "floor_percent" or rows[0].method == "published"
            if is_other or "{}" not in printed.cell.template:
                continue
            if printed.page.startswith(("README", "docs")) == is_readme:
                by_name.setdefault(printed.reading.name, []).append(printed)
        source = random.Random(SEED)  # noqa: S311  # the same values every time
        kinds = sorted(by_name)
        chosen += [source.choice(by_name[kinds[k % len(kinds)]]) for k in range(SAMPLED // 2)]
    return chosen


@cache
def measured_lines() -> tuple[Raw, ...]:
    """Return the lines with samples in the files of all committed runs, as JSON."""
    lines: list[Raw] = []
    for name in git(ROOT, "ls-files", "results/*/*.jsonl*").splitlines():
        content = (ROOT / name).read_bytes()
        text = (gzip.decompress(content) if name.endswith(".gz") else content).decode()
        lines += [line for line in map(json.loads, text.splitlines()) if line["record"] == "measurement"]
    return tuple(map(of_one_generation, lines))


def of_one_generation(line: Raw) -> Raw:
    """Divide the times of a call by its generations."""
    count = dict(line["variant"]["options"]).get(SCANNED, 1)
    if line["phase"] != "step" or count == 1:
        return line
    return {**line, "samples": [[sample / count for sample in visits] for visits in line["samples"]]}


def raw(row: Measurement) -> Raw:
    """Return a line with the key and the samples of a row."""
    samples = [list(visits) for visits in row.samples]
    return next(
        line
        for line in measured_lines()
        if (line["phase"], line["metric"], line["method"]) == (row.phase, row.metric, row.method)
        and line["samples"] == samples
        and line.get("group", 0) == row.group
        and msgspec.convert(line["variant"], Variant) == row.variant
        and msgspec.convert(line["case"], Case) == row.case
    )


def flat(line: Raw) -> list[float]:
    """Return all samples of a line."""
    return [sample for visits in line["samples"] for sample in visits]


def middle(line: Raw) -> float:
    """Return the median over a line's rounds of the median of each."""
    return statistics.median(statistics.median(visits) for visits in line["samples"])


def ratio(above: Raw, below: Raw) -> float:
    """Return the median of the ratios in common rounds; of fewer than two, the ratio of medians."""
    pairs = list(zip(above["samples"], below["samples"], strict=False))
    if above.get("group", 0) == below.get("group", 0) and above["phase"] == below["phase"] and len(pairs) > 1:
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)
    return middle(above) / middle(below)


def n_effs(lines: Sequence[Raw]) -> list[float]:
    """Return the candidates for n_eff: by the closed form of kappa, and by the replicates."""
    by_kind = {(line["metric"], line["method"]): line for line in lines if line["phase"] == "quality"}
    case = lines[0]["case"]
    n = case["members"]
    replicates = by_kind.get(("effective_members", "linear fitness"))
    values = flat(replicates) if replicates else []
    candidates = [1 / statistics.mean(1 / value for value in values), least(values, n)] if values else []
    closed, fitted = by_kind.get(("kappa", "closed form")), by_kind.get(("kappa", "linear fitness"))
    if closed and fitted and replicates:
        # d from the law 1 / n_eff = 1 / n + kappa / d, in the replicate that determines it best.
        kappa, n_eff = max(zip(flat(fitted), flat(replicates), strict=True), key=lambda pair: abs(pair[0]))
        d = round(kappa / (1 / n_eff - 1 / n)) if kappa else 1
        candidates.append(n / (1 + flat(closed)[0] * n / d))
    return candidates


def least(replicates: Sequence[float], members: int) -> float:
    """Return the lower bound of n_eff, by Student's interval of the mean reciprocal; at most 100 times n."""
    reciprocals = [1 / value for value in replicates]
    half = (
        float(student.ppf(0.975, len(reciprocals) - 1))
        * statistics.stdev(reciprocals)
        / math.sqrt(len(reciprocals))
    )
    return 1 / max(statistics.mean(reciprocals) + half, 1 / (100 * members))


def lines_of_variant(lines: Sequence[Raw]) -> list[Raw]:
    """Return the lines of the value's own variant, which come first."""
    return [line for line in lines if line["variant"] == lines[0]["variant"]]


def rates(lines: Sequence[Raw]) -> list[float]:
    """Return n_eff over the milliseconds of a step."""
    step, own = middle(lines[0]) / 1e6, lines_of_variant(lines)
    counts = [flat(line)[0] for line in own if line["metric"] == "n_eff_count"]  # of a whole generation
    return [value / step for value in counts or n_effs(own)]


def by_dense(lines: Sequence[Raw]) -> list[float]:
    """Return a rate over the rate of the reference: dense noise, or the variant itself."""
    others = [line for line in lines if line["variant"] != lines[0]["variant"]] or lines
    return [a / b for a in rates(lines) for b in rates(others)]


def shares(lines: Sequence[Raw]) -> list[float]:
    """Return n_eff as a percentage of the members."""
    return [100 * value / lines[0]["case"]["members"] for value in n_effs(lines_of_variant(lines))]


def at_sigma(lines: Sequence[Raw]) -> list[float]:
    """Return the mean of the replicates of n_eff, by their reciprocals."""
    return [1 / statistics.mean(1 / value for value in flat(lines[0]))]


FORMULAS: dict[str, Formula] = {
    TIME_MULTIPLIER: lambda lines: [ratio(lines[0], lines[1])],
    MEMORY_MULTIPLIER: lambda lines: [ratio(lines[0], lines[1])],
    SPEED_MULTIPLIER: lambda lines: [ratio(lines[1], lines[0])],
    RATE_PER_MS: rates,
    RATE_MULTIPLIER: by_dense,
    EFFECTIVE_PERCENT: shares,
    "effective_members": lambda lines: n_effs(lines_of_variant(lines)),
    "effective_members_at_sigma": at_sigma,
    "effective_percent_at_sigma": lambda lines: [100 * at_sigma(lines)[0] / lines[0]["case"]["members"]],
    "kappa": lambda lines: [statistics.mean(flat(line)) for line in lines if line["metric"] == "kappa"],
    "kappa_difference": lambda lines: [statistics.mean(flat(lines[0])) - statistics.mean(flat(lines[1]))],
    "evaluations_per_gb": lambda lines: [2 * lines[0]["case"]["members"] / middle(lines[0]) * 1e9],
    "achieved_bytes_per_s": lambda lines: [lines[0]["work"]["moved_bytes"] / middle(lines[0]) * 1e9],
    "achieved_flops_per_s": lambda lines: [lines[0]["work"]["flops"] / middle(lines[0]) * 1e9],
}
"""Functions for the possible values of a cell from its lines; other cells are means or medians."""


def recomputed(reading: CellNumber) -> list[float]:
    """Return the possible values of a cell, from the lines of its rows."""
    lines = [raw(row) for row in reading.rows]
    if reading.name in FORMULAS:
        return FORMULAS[reading.name](lines)
    return [statistics.mean(flat(lines[0])) if lines[0]["phase"] == "quality" else middle(lines[0])]


def test_printed_values_follow_from_the_samples_of_their_rows() -> None:
    """Every value has its rows, and fifty of the README and reports match their samples.

    A value that is off by one per cent does not match.
    """
    assert len(all_values()) > 10_000
    assert [printed for printed in all_values() if not printed.reading.rows] == []
    names = {value.reading.name for value in sampled_values() if value.page.startswith(("README", "docs"))}
    assert names >= {"latency_ns", "peak_bytes", "noise_bytes", TIME_MULTIPLIER, SPEED_MULTIPLIER}
    assert names >= {RATE_PER_MS, RATE_MULTIPLIER, EFFECTIVE_PERCENT, "kappa"}
    for printed in sampled_values():
        reading = printed.reading
        assert reading.value is not None
        expected = recomputed(reading)
        assert any(reading.value == pytest.approx(value, rel=1e-6, abs=1e-12) for value in expected), printed
        assert reading.text() in printed.cell.text()
        line = printed.table.markdown().splitlines()[2 + printed.row]
        assert line in (ROOT / printed.page).read_text(encoding="utf-8").splitlines(), printed
        if reading.name == "latency_ns":
            for factor in (0.99, 1.01):
                assert reading.value * factor not in [pytest.approx(value, rel=1e-6) for value in expected]
