"""Rules of the tables that hold for any run; ``golden/examples.md`` shows the others."""

import msgspec
import pytest
from msgspec.structs import replace

from esbench.registry import REGISTRY, load
from esbench.report.analysis import roofline
from esbench.report.analysis.pivot import UNMEASURED, grids, operators
from esbench.report.site import all_sections
from esbench.report.tables import roofline as roofline_tables
from esbench.report.tables.measured import time_sections
from esbench.schema import DevicePeak, Row, Work
from esbench.text import escape
from tests import synthetic
from tests.report import ranking_cases
from tests.synthetic import (
    BASE,
    DENSE,
    bytes_row,
    failed,
    linear,
    skipped,
    three,
    time_row,
    variant,
    working,
)

SMALL = linear(256)


def test_every_grid_of_a_run_is_shown_once() -> None:
    """Each measurement is in a table, quality in separate ones, and titles are unique."""
    rows: list[Row] = [
        time_row(DENSE, SMALL, 1.0, phase=phase) for phase in ("sample", "forward", "update", "step")
    ]
    rows += [
        bytes_row(DENSE, SMALL, name, 1) for name in ("peak_bytes", "noise_bytes", "utilization_percent")
    ]
    run = synthetic.run(rows)
    assert len(all_sections(run)) == len(rows) == len(grids(run, "Linear", ""))
    run = ranking_cases.run([*ranking_cases.rows(), *ranking_cases.digits(ranking_cases.SQUARE)])
    for operator in ("Linear", "DigitsMLP"):
        assert all(grid.phase != "quality" for suffix in ("", "_ns") for grid in grids(run, operator, suffix))
    titles = [section.title for section in all_sections(run)]
    assert len(titles) == len(set(titles))
    assert titles.index("Linear (64, 64): n_eff per ms") < titles.index("Linear, step: time")


def test_reasons_have_a_table_of_times_where_nothing_was_timed() -> None:
    """A reason has the table of its phase and method; a phase that is lost has one without a method."""
    plain = variant("Plain")
    rows: list[Row] = [
        time_row(DENSE, SMALL, 1.0, phase="step", method="eager"),
        skipped(DENSE, SMALL, "no graph", "step", method="graph"),
        skipped(DENSE, SMALL, "one layer", "update", method="layers"),
        skipped(plain, SMALL, "no device"),
        skipped(plain, SMALL, "draws no noise", "sample"),
        failed(plain, SMALL, "raised", "step"),
    ]

    def shown(rows: list[Row]) -> list[tuple[str, str]]:
        return [(grid.phase, grid.method) for grid in grids(synthetic.run(rows), "Linear", "_ns")]

    assert shown(rows) == [("step", "eager"), ("step", "graph")]
    assert shown([*rows, failed(DENSE, SMALL, "raised", "update")]) == [
        ("update", UNMEASURED),
        ("step", "eager"),
        ("step", "graph"),
    ]
    timed_base = time_row(BASE, SMALL, 1.0, phase="step")
    assert shown([timed_base, failed(plain, SMALL, "raised", "step")]) == [("step", "host")]
    assert shown(rows[3:]) == [("forward", UNMEASURED), ("sample", UNMEASURED), ("step", UNMEASURED)]


def test_columns_are_in_the_order_of_the_suite() -> None:
    """Cases run in random order, but columns go from large kernels and narrow layers to wide ones."""
    load("impls")
    planned = REGISTRY.find_suite("readme").cases
    measured = synthetic.run(
        time_row(BASE, case, 1.0) for case in sorted(planned, key=lambda case: case.label[::-1])
    )
    assert operators(measured) == ["Linear", "Conv2d"]
    for operator in operators(measured):
        (section,) = time_sections(measured, operator, "forward")
        columns = [case.shape for case in planned if case.operator == operator]
        assert list(section.blocks[0].table.headings) == columns


def test_markup_in_names_is_escaped() -> None:
    """Links, pictures, tags, headings and emphasis in a name are escaped; cells and lines stay whole."""
    for words, source in (
        ("[a](https://b.c)", "\\[a\\](https\\://b.c)"),
        ("![a](a.png)", "\\!\\[a\\](a.png)"),
        ("<img src=a>", "\\<img src=a\\>"),
        ("a [1] [1](b) [1][2] [1]: c", "a [1] \\[1\\](b) \\[1\\][2] \\[1\\]: c"),
        ("[a [1]](b)", "\\[a [1]\\](b)"),
        ("# a", "\\# a"),
        ("> a", "\\> a"),
        ("_a_ **b** ~~c~~ `d`", "\\_a\\_ \\*\\*b\\*\\* \\~\\~c\\~\\~ \\`d\\`"),
        ("www.a.b c@d.e", "www\\.a.b c\\@d.e"),
        ("Permuted(side=out, in_sparsity=0.5): x", "Permuted(side=out, in_sparsity=0.5): x"),
        ("a\nb\x00c\x1b[1m\u202ed", "a b c \\[1m d"),
    ):
        assert escape(words) == source
        odd = msgspec.structs.replace(SMALL, operator=words)
        (section,) = time_sections(synthetic.run([time_row(DENSE, odd, 1.0)]), words)
        assert section.markdown().startswith(f"### {source}, forward: time\n")
        assert "\x1b" not in section.text()
    bars = variant("Odd", note="a|b\nc<d>")
    (section,) = time_sections(synthetic.run([*three(SMALL), time_row(bars, SMALL, 1.0)]), "Linear")
    tables = [line.replace("\\|", "") for line in section.markdown().splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {3}


def test_the_roofline_bound_is_the_longer_of_arithmetic_and_traffic() -> None:
    """Of several peaks the best is used, by its faster samples; each dtype has its own product."""
    run = synthetic.run([], device_peaks=synthetic.peaks())
    for flops, moved_bytes, bound_ms in ((1e7, 1e5, 1.0), (1e6, 5e5, 0.5), (0, 1e6, 1.0), (1e6, 0, 0.1)):
        work = Work(flops=flops, moved_bytes=moved_bytes, output_bytes=0)
        assert roofline.bound_ns(run, "float32", work) == pytest.approx(bound_ms * 1e6)
        assert roofline.bound_ns(run, "tfloat32", work) is None or not flops
    slow = DevicePeak(kind="copy", dtype="float32", amount=1e6, samples=(9e6, 1.0, 2e6, 2e6, 2e6, 9e6))
    several = msgspec.structs.replace(run, device_peaks=(slow, *synthetic.peaks()))
    assert roofline.rate(several, "copy", "float32") == 1.0
    assert roofline.rate(msgspec.structs.replace(run, device_peaks=(slow,)), "copy", "float32") == 0.5
    assert roofline.rate(run, "matmul", "tfloat32") is None
    assert roofline.rate(run, "copy", "tfloat32") == 1.0


@pytest.mark.parametrize("samples", [None, (), (0.0,), (float("nan"),)])
def test_without_work_or_peaks_there_is_no_roofline(samples: tuple[float, ...] | None) -> None:
    """Without declared work, usable peak samples or a time, the section is left out without an error."""
    row, peaks = working(time_row(DENSE, SMALL, 2.0), 1.0, 1.0), synthetic.peaks()
    assert len(roofline_tables.sections(synthetic.run([row], device_peaks=peaks), "Linear")) == 1
    unusable = () if samples is None else tuple(replace(peak, samples=samples) for peak in peaks)
    no_work = Work(flops=0, moved_bytes=0, output_bytes=0)
    for fields, known in (
        ({}, unusable),
        ({"work": None}, peaks),
        ({"work": no_work}, peaks),
        ({"samples": ((0.0,),)}, peaks),
    ):
        run = synthetic.run([msgspec.structs.replace(row, **fields)], device_peaks=known)
        assert roofline_tables.sections(run, "Linear") == []
