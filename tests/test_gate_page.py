"""The study of the gate as a page and a picture."""

import dataclasses
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from esbench.errors import UserError
from esbench.gate.records import Replicate
from esbench.gate.study import newest_of_each
from esbench.report import gate_findings
from esbench.report.gate_findings import Findings, findings
from esbench.report.gate_goals import goals
from esbench.report.gate_study import gate_page, render_gate
from esbench.report.pages import render_reports
from esbench.report.plots.gate_power import gate_power
from tests.gate_study_cases import CELLS, opening, replicates, stored, study_of

QUIET = {"between": 0.0008, "within": 0.004}


@pytest.fixture(autouse=True)
def few_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw fewer suites than a page has: enough for what is asked here."""
    monkeypatch.setattr(gate_findings, "SUITES", 60)
    monkeypatch.setattr(gate_findings, "TRIALS", 20)
    monkeypatch.setattr(gate_findings, "LEAST_COMPARISONS", 120)


def page_of(*found: Replicate) -> str:
    """Return the page of a study of these replicates."""
    return gate_page([findings(study_of(*found))], pictured=False)


def section(page: str, title: str) -> str:
    """Return the part of a page under a title that begins so."""
    return page.partition(f"### {title}")[2].partition("### ")[0]


def verdicts(found: Findings) -> list[str]:
    """Return the verdicts of all goals."""
    return [goal.verdict for goal in goals(found)]


def test_the_same_study_gives_the_same_bytes(tmp_path: Path) -> None:
    """The page with every table and where the study was taken, and the plot."""
    stored(tmp_path / "results", *replicates(16, **QUIET))
    written = [render_gate(tmp_path / "results", tmp_path / out) for out in ("a", "b")]
    assert [path.name for path in written[0]] == ["gate.md", "gate-power.svg"]
    for one, other in zip(*written, strict=True):
        assert one.read_bytes() == other.read_bytes()
    text = written[0][0].read_text()
    for words in (
        "## Some CPU",
        "16 replicates of 6 cells and 5 controls; 2 threads",
        "commit aaaaaaa in both arms",
        "load average 0.500 at its start; the replicates took 960 s",
        "16 are enough for 1 that have none in common",
        '<img src="gate-power.svg" alt="How often a rule flags a slowdown" width="900">',
    ):
        assert words in text
    assert text.count("### ") == 5
    assert "Not shown" not in text


def test_a_gate_that_holds_meets_its_goals() -> None:
    """What is counted stands beside the verdict."""
    found = findings(study_of(*replicates(16, **QUIET)))
    assert verdicts(found) == ["met"] * 6
    assert goals(found)[0].found == "0 in 60 suites, 0 in 360 comparisons"
    assert goals(found)[2].found == "100 %"


def test_a_gate_that_is_too_noisy_misses_them() -> None:
    """It finds nothing, and says so on the page; there is no alarm."""
    found = findings(study_of(*replicates(16, between=0.02)))
    assert verdicts(found) == ["met", "met", *["**not met**"] * 4]
    assert "| **not met** |" in gate_page([found], pictured=False)


def test_an_alarm_is_a_goal_that_is_missed() -> None:
    """By one cell or by the mean alone; a rare one is no more than that."""
    found = findings(study_of(*replicates(13, **QUIET)))
    assert found.resampled is not None

    def with_alarms(**counts: int) -> Findings:
        assert found.resampled is not None
        changed = dataclasses.replace(found.resampled.alarms, **counts)
        return dataclasses.replace(found, resampled=dataclasses.replace(found.resampled, alarms=changed))

    assert verdicts(with_alarms(alarmed=2, failed=2))[:2] == ["**not met**"] * 2
    assert verdicts(with_alarms(alarmed=1, failed=0, suites=1000))[:2] == ["**not met**", "met"]


def test_arms_that_are_unlike_show_on_the_page() -> None:
    """Though random swapping takes them for noise: the arms as measured are beside it, and their offset."""
    cells = {name: {**QUIET, "slower": 0.02} for name in CELLS}
    text = section(page_of(*replicates(16, cells)), "False alarms")
    assert "| share of suites with a FAIL" in text
    (row,) = (line for line in text.splitlines() if "share of suites with a FAIL" in line)
    assert row.split("|")[3].strip() == "100 %"
    assert re.search(r"head takes longer by \+(1\.9|2\.0)", text)


def test_a_cell_that_differs_between_processes_is_named_first() -> None:
    """With its share of the variance."""
    cells = {name: {"between": 0.02 * (name == CELLS[4]), "within": 0.004} for name in CELLS}
    text = section(page_of(*replicates(16, cells)), "Within and between")
    named = [line for line in text.splitlines() if "Variant" in line]
    assert len(named) == 5
    assert named[0].startswith("| Variant4 ")


def test_fewer_replicates_than_a_gate_takes_are_said() -> None:
    """What needs no suite is shown all the same: the variances and the other rules."""
    found = findings(study_of(*replicates(12, **QUIET)))
    text = gate_page([found], pictured=False)
    assert set(verdicts(found)) == {"not shown"}
    assert text.count("Not shown: a gate takes 13 replicates, and the study holds 12.") == 3
    assert "asv" in section(text, "Beside")
    assert "Variant0" in section(text, "Within")


@pytest.mark.parametrize("count", [0, 1])
def test_a_study_that_broke_off_at_its_start_is_said(count: int) -> None:
    """One replicate has no variance, none has nothing."""
    found = findings(study_of(*replicates(count)))
    text = gate_page([found], pictured=False)
    assert text.count("Not shown") == 5 - (count > 0)
    assert (gate_power([found]) is None) == (count == 0)


def test_a_cell_that_is_not_in_every_replicate_is_left_out() -> None:
    """And named; so is one that stands twice in a replicate."""
    first, second, *rest = replicates(14, **QUIET)
    first = msgspec.structs.replace(first, cells=first.cells[1:])
    second = msgspec.structs.replace(second, cells=(*second.cells, second.cells[1]))
    found = findings(study_of(first, second, *rest))
    assert sorted(found.arrays.left_out) == list(CELLS[:2])
    assert "Left out, as not once in every replicate: Variant" in gate_page([found], pictured=False)
    assert found.arrays.cells.names == CELLS[2:]


def test_a_study_of_one_cell_has_more_suites() -> None:
    """So many that the cell is judged often enough; no other cell can be named."""
    found = findings(study_of(*replicates(16, {CELLS[0]: QUIET})))
    assert found.resampled is not None
    assert found.resampled.alarms.comparisons == 120
    assert "| one cell" in gate_page([found], pictured=False)


def test_a_study_without_cells_or_without_controls_is_said() -> None:
    """Either has a page."""
    assert "no cell stands in every replicate" in page_of(*replicates(14, {}))
    without = [
        msgspec.structs.replace(one, cells=tuple(c for c in one.cells if c.cell in CELLS))
        for one in replicates(14, **QUIET)
    ]
    found = findings(study_of(*without))
    text = gate_page([found], pictured=False)
    assert "the study holds no work of a known surplus" in text
    assert "controls would have made" not in text
    assert verdicts(found) == ["met"] * 4 + ["not shown"] * 2
    half = [
        msgspec.structs.replace(one, cells=tuple(c for c in one.cells if "2 %" not in c.cell))
        for one in replicates(14, **QUIET)
    ]
    assert "controls would have made" not in page_of(*half)
    assert "controls would have made" in page_of(*replicates(14, **QUIET))


def test_replicates_of_a_gate_are_none_of_a_study() -> None:
    """Their cells are those that looked slower."""
    kept = [msgspec.structs.replace(one, stage="confirm") for one in replicates(13)]
    assert findings(study_of(*kept)).arrays.cells.names == ()


def test_every_method_has_controls_of_its_own() -> None:
    """The one that finds least decides a goal."""
    doubled = [
        msgspec.structs.replace(
            one,
            cells=(
                *one.cells,
                *(
                    msgspec.structs.replace(c, cell=c.cell.replace("host", "graph"), head=c.base)
                    for c in one.cells
                    if c.cell.startswith("control")
                ),
            ),
        )
        for one in replicates(16, **QUIET)
    ]
    found = findings(study_of(*doubled))
    assert found.resampled is not None
    assert len(found.resampled.controls) == 10
    assert verdicts(found)[-1] == "**not met**"


def test_the_newest_study_of_each_device_is_shown(tmp_path: Path) -> None:
    """In the order of their folders; what is not complete has no place here."""
    for number in (2, 1):
        stored(tmp_path, number=number)
    other = stored(tmp_path, number=3, device_name="Another")
    (other.parent / "20261129T000000Z-gate-0000.jsonl").write_text("{")
    assert [path.name[:8] for path in newest_of_each(tmp_path)] == ["20261123", "20261122"]
    text = render_gate(tmp_path, tmp_path / "out")[0].read_text()
    assert text.index("## Another") < text.index("## Some CPU")


def test_without_a_study_there_is_no_page(tmp_path: Path) -> None:
    """Nothing is written."""
    assert render_gate(tmp_path, tmp_path / "out") == []
    assert not (tmp_path / "out").exists()


def test_the_report_holds_the_page(tmp_path: Path) -> None:
    """Beside those of the other studies."""
    stored(tmp_path / "results", *replicates(13, **QUIET))
    written, problems = render_reports(tmp_path / "results", tmp_path / "out")
    assert tmp_path / "out" / "gate.md" in written
    assert problems == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content[:100], "cannot be read"),
        (lambda content: b"no gzip" + content, "cannot be read"),
        (lambda _: b"", "no study of the gate"),
    ],
    ids=["half a file", "no gzip", "empty"],
)
def test_a_damaged_study_is_a_problem_and_no_crash(
    tmp_path: Path, change: Callable[[bytes], bytes], words: str
) -> None:
    """One line with the file; the other pages are written."""
    path = stored(tmp_path / "results", *replicates(1))
    path.write_bytes(change(path.read_bytes()))
    written, (problem,) = render_reports(tmp_path / "results", tmp_path / "out")
    assert written == []
    assert words in str(problem)
    assert path.name in str(problem)
    assert problem.lost


def test_a_foreign_study_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """One of another version, and one whose arms do not pair."""
    stored(tmp_path / "a", msgspec.structs.replace(opening(), schema=9))
    (first,) = replicates(1)
    unpaired = msgspec.structs.replace(first.cells[0], base=first.cells[0].base[:3])
    stored(tmp_path / "b", msgspec.structs.replace(first, cells=(unpaired,)))
    with pytest.raises(UserError, match="twice in each of its rounds"):
        render_gate(tmp_path / "b", tmp_path)
    path = stored(tmp_path / "c", first)
    shutil.copy(path, path.with_name("20261130T000000Z-gate-0000.jsonl.gz"))
    assert len(newest_of_each(tmp_path / "c")) == 1


def test_words_of_a_foreign_study_are_not_live() -> None:
    """A link in the name of a device or of a cell stays a name."""
    found = findings(study_of(*replicates(13, {"[a](b)": QUIET}), device_name="[c](d)", cpu="<e>"))
    text = gate_page([found], pictured=False)
    for words in ("\\[a\\](b)", "## \\[c\\](d)", "\\<e\\>"):
        assert words in text


def _percentages(line: str) -> Iterator[str]:
    yield from (cell.strip() for cell in line.split("|") if "%" in cell)


def test_ours_stands_first_among_the_rules() -> None:
    """With what was found of the suites, in the columns of the others."""
    text = section(page_of(*replicates(16, **QUIET)), "Beside")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[2].startswith("| esbench gate ")
    assert list(_percentages(rows[2]))[:2] == ["0 %", "0 %"]
    assert len({row.count("|") for row in rows}) == 1
