"""The runs that a report shows, and the reasons why others are left out."""

from pathlib import Path

import pytest

from esbench.cli.options import print_problems
from esbench.report.site import selection
from esbench.schema import Request, RunEnd
from esbench.store import Problem
from tests.report.report_cases import a_run, store
from tests.synthetic import changed

WHOLE = "20260105T000000Z-quick-0005"


def pages(folder: Path) -> dict[str, str]:
    """Return the id of the run of each page."""
    shown = selection(folder / "results", folder / "reports").pages
    return {page.relative_to(folder / "reports").as_posix(): run.header.run_id for page, run in shown.items()}


def test_each_page_shows_one_run_and_the_others_have_reasons(tmp_path: Path) -> None:
    """Shown is the newest run that is whole; runs of one reason share a line with the newest of them."""
    runs: dict[str, dict[str, object]] = {
        "20260101T000000Z-quick-0001": {},
        "20260102T000000Z-quick-0002": {},
        WHOLE: {},
        "20260106": {"dirty": True},
        "20260107": {"request": Request(cases="Linear*")},
        "20260108": {"end": RunEnd(status="complete", wall_s=1.0, invalid=("hot",))},
        "20260109": {"end": None},
        "20260109b": {"end": RunEnd(status="interrupted", wall_s=1.0)},
        "20260110": {"rows": ()},
        "20260111": {"device_name": "Test GPU", "dirty": True},
    }
    for name, fields in runs.items():
        store(tmp_path, changed(a_run(name), **fields))
    assert pages(tmp_path) == {"test-cpu/quick": WHOLE, "test-gpu/quick": "20260111"}
    selected = selection(tmp_path / "results", tmp_path / "reports")
    assert selected.left_out == [
        "left out, it has no end: 20260109",
        "left out, it has uncommitted changes: 20260106",
        "left out, it holds part of its suite (cases Linear*): 20260107",
        "left out, it is invalid (hot): 20260108",
        "left out, it was interrupted: 20260109b",
        "left out, superseded by a newer run: 20260102T000000Z-quick-0002 and 1 more",
        "left out, without a row: 20260110",
    ]


def test_a_run_of_uncommitted_code_is_the_second_choice(tmp_path: Path) -> None:
    """Such a run is preferred to an invalid run, but not to an older run of committed code."""
    store(tmp_path, changed(a_run("20260107"), end=None))
    store(tmp_path, changed(a_run("20260106"), dirty=True))
    assert pages(tmp_path) == {"test-cpu/quick": "20260106"}
    store(tmp_path, a_run("20250101"))
    assert pages(tmp_path) == {"test-cpu/quick": "20250101"}


def test_bad_lines_of_a_file_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    """A file with several bad lines gets one line: their number, and the error of the first."""
    bad = [Problem(Path("a"), f"no {line}", line) for line in (2, 3, 7)]
    half, invalid = Problem(Path("a"), "half a line", 9, lost=False), Problem(Path("b"), "no row", 4)
    print_problems([*bad, half, invalid, Problem(Path("c"), "is empty")])
    assert capsys.readouterr().err.splitlines() == [
        "esbench: a: 3 lines could not be read, the first: line 2: no 2",
        "esbench: a:9: half a line",
        "esbench: b:4: no row",
        "esbench: c: is empty",
    ]
