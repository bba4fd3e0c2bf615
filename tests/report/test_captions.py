"""What stands over and under the tables of a run: captions, conditions and footnotes."""

import msgspec
import pytest

from esbench.report import captions
from esbench.report.site import console_tables
from esbench.report.tables.measured import time_sections
from esbench.schema import Request, RunEnd
from tests import synthetic
from tests.report.table_cases import LARGE, SMALL, SPARSE, forward
from tests.synthetic import BASE, DENSE, NAIVE, linear, three, time_row


@pytest.mark.parametrize(
    ("reason", "clause"),
    [
        ("Linear: k = 2 is above the width: the weight has 1 input columns", "k = 2 is above the width"),
        ("net.0: rank = 9 is too much", "rank = 9 is too much"),
        ("stopped: out of memory already at members 256", "out of memory already at me…"),
        ("time budget: members 64 took 9 s", "time budget"),
        ("no room", "no room"),
    ],
)
def test_cell_has_the_first_clause_of_a_reason(reason: str, clause: str) -> None:
    """A word in front that only says where is no reason; all of it stands below the table."""
    assert captions.shorten(reason) == clause


def test_multipliers_say_how_sure_they_are() -> None:
    """Under a block of multipliers stand the usual and the widest interval of its ratios."""
    rounds = range(1, 7)
    rows = [
        time_row(BASE, SMALL, *(float(k) for k in rounds)),
        time_row(DENSE, SMALL, *(2.0 * k for k in rounds)),
        time_row(SPARSE, SMALL, *(4.0 * k + 0.4 * (k == 1) - 0.4 * k * (k == 2) for k in rounds)),
    ]
    section = forward(*rows)
    usual = "ratios inside rounds; 95 % intervals for 2 of 2 cells: ±5.00 % in the median, ±10.0 % at most."
    assert usual in section.text()
    some = forward(*rows, time_row(BASE, LARGE, 1, 2), time_row(DENSE, LARGE, 2, 4))
    assert "95 % intervals for 2 of 3 cells: ±5.00 %" in some.text()
    none = forward(time_row(BASE, LARGE, 1, 2), time_row(DENSE, LARGE, 2, 4))
    assert "no 95 % intervals: the rows of 1 cells" in none.blocks[1].note


def test_remarks_say_what_the_samples_went_through() -> None:
    """Labels, budgets, outliers and visits off clock are footnotes with counts, and no number changes."""
    outlying = time_row(SPARSE, SMALL, 1, 1.1, 1.2, 1.3, 9)
    rows = [
        synthetic.clocks(time_row(BASE, SMALL, 1, 1, 1, 1), 1000, 1000, 1000, 1000),
        synthetic.clocks(time_row(DENSE, SMALL, 2, 2, 2, 2), 1000, 1000, 1000, 900, throttled=("heat",)),
        msgspec.structs.replace(outlying, stop="budget of 1 s", labels=("dispatch-bound: 3 of 5 samples",)),
        time_row(NAIVE, SMALL, 5),
    ]
    section = forward(*rows)
    assert section.footnotes == (
        "dispatch-bound: 3 of 5 samples: 1 of 4 cells, SparsePerturbedLinear(k=2) (256, 256)",
        "stopped by the budget of 1 s: 1 of 4 cells, SparsePerturbedLinear(k=2) (256, 256)",
        (
            "outliers (modified z-score above 3.5), kept: more than 10 % of the samples in 1 of 4 cells, "
            "at most 20 % in SparsePerturbedLinear(k=2) (256, 256)"
        ),
        (
            "off the run's median clock by more than 2 %: visits in 1 of 4 cells, "
            "at most 25 % in PerturbedLinear (256, 256)"
        ),
        "throttled: visits in 1 of 4 cells, at most 100 % in PerturbedLinear (256, 256)",
    )
    assert section.blocks[0].frame.loc["SparsePerturbedLinear(k=2)", "(256, 256)"] == "1.20"


def test_cells_of_a_run_with_a_time_budget_share_a_footnote() -> None:
    """Each had other seconds; the first is an example."""
    rows = [
        msgspec.structs.replace(time_row(v, SMALL, 1.0), stop=f"budget of {seconds:g} s")
        for seconds, v in ((0.25, DENSE), (0.031, BASE))
    ]
    assert forward(*rows).footnotes == (
        "stopped by the budget of 0.25 s: 2 of 2 cells, such as PerturbedLinear (256, 256)",
    )


def test_labels_of_one_kind_are_one_footnote() -> None:
    """Labels that differ in their counts only are counted together, with the first as an example."""
    rows = [
        msgspec.structs.replace(time_row(v, SMALL, 1.0), labels=(f"dispatch-bound: in {count} samples",))
        for count, v in enumerate((DENSE, BASE))
    ]
    assert forward(*rows).footnotes == (
        "dispatch-bound: in 0 samples: 2 of 2 cells, such as PerturbedLinear (256, 256)",
    )


def test_warm_up_that_did_not_settle_is_said() -> None:
    """Rows that were still getting faster or slower when they were measured are counted in a footnote."""
    rows = [
        msgspec.structs.replace(time_row(v, SMALL, 1.0), warm_up=state)
        for v, state in (
            (DENSE, "not flat after 3.00 s"),
            (NAIVE, "not flat after 3.10 s"),
            (BASE, "flat after 4 blocks, 0.1 s"),
        )
    ]
    assert forward(*rows).footnotes == (
        "warm-up: not flat after 3.00 s: 2 of 3 cells, such as PerturbedLinear (256, 256)",
    )


@pytest.mark.parametrize(
    ("load", "shown"), [(None, ""), (0.5, ""), (3.4, "Load 3.40 on 2 threads at the start")]
)
def test_other_programs_at_the_start_are_said(load: float | None, shown: str) -> None:
    """A load average above a quarter of the threads stands in the caption of every table."""
    run = synthetic.run(three(SMALL))
    here = msgspec.structs.replace(run.header.environment, load=load)
    header = msgspec.structs.replace(run.header, environment=here)
    (section,) = time_sections(msgspec.structs.replace(run, header=header), "Linear")
    assert shown in section.origin
    assert ("other programs may have disturbed these times" in section.origin) == bool(shown)


def test_part_of_a_suite_is_said() -> None:
    """A run that was restricted to some variants, cases, phases or methods says so in its caption."""
    run = synthetic.run(three(SMALL))
    for asked, shown in (
        (Request(), ""),
        (Request(variants=("*",), dtype="bfloat16", plugins=("mine.py",)), ""),
        (Request(variants=("Base",), phases="forward"), "Part of the suite: variants Base; phases forward."),
    ):
        header = msgspec.structs.replace(run.header, request=asked)
        (section,) = time_sections(msgspec.structs.replace(run, header=header), "Linear")
        assert shown in section.origin
        assert ("Part of" in section.origin) == bool(shown)


def test_invalid_run_is_said_first() -> None:
    """Every caption and the terminal begin with why the figures of a run must not be used."""
    run = synthetic.run(three(SMALL), invalid=("throttled", "other processes"))
    (section,) = time_sections(run, "Linear")
    assert section.origin.startswith("INVALID: throttled; other processes. Test CPU")
    assert console_tables(run).startswith("INVALID: throttled; other processes.")


def test_formats_and_antithetic_cases_have_tables_of_their_own() -> None:
    """Number formats never share a table, nor do plain and antithetic populations."""
    paired = msgspec.structs.replace(linear(256, members=512, repeats=2), antithetic=True)
    rows = [*three(SMALL), *three(linear(256, dtype="bfloat16")), *three(paired)]
    conditions = [section.conditions for section in time_sections(synthetic.run(rows), "Linear")]
    assert conditions == [
        "float32, 1024 x 1 (members x repeats).",
        "bfloat16, 1024 x 1 (members x repeats).",
        "float32, 512 x 2 (members x repeats), antithetic.",
    ]


def test_caption_says_where_figures_come_from() -> None:
    """Device, threads, suite, date, commit and versions stand over every table."""
    origin = forward(*three(SMALL)).origin
    for part in ("Test CPU (2 threads)", "suite quick of 2026-01-01", "commit 0123456", "esbench 0.1.0"):
        assert part in origin
    assert "cells may be missing" not in origin


@pytest.mark.parametrize(("end", "said"), [(None, "has no end"), ("interrupted", "was interrupted")])
def test_unfinished_run_is_said(end: str | None, said: str) -> None:
    """Tables of a run that was killed or interrupted say so."""
    run = synthetic.run(three(SMALL))
    last = msgspec.convert({"record": "end", "status": end, "wall_s": 1.0}, RunEnd) if end else None
    (section,) = time_sections(msgspec.structs.replace(run, end=last), "Linear")
    assert said in section.origin


def test_a_sweep_names_its_first_and_its_last_batch() -> None:
    """Eleven populations would fill the caption; four are listed."""
    for count, words in ((4, "8 x 1, 16 x 1, 32 x 1, 64 x 1"), (5, "8 x 1 to 128 x 1")):
        cases = [msgspec.structs.replace(linear(4, 4), members=2 ** (3 + power)) for power in range(count)]
        measured = synthetic.run([row for case in cases for row in three(case)])
        (section,) = time_sections(measured, "Linear", "forward")
        assert f"{words} (members x repeats)" in section.conditions
