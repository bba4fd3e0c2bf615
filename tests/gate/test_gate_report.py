"""Decisions shown on a terminal, in a pull request and with hostile names."""

import re

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from esbench.gate import report
from esbench.gate.records import MEAN, Decision, Verdict
from tests.gate.gate_cases import ABLE, BAKER, DOG, decision, timed

SLOWER = timed(BAKER.name, 0.0213, 0.004, "FAIL")
HEAVIER = Verdict(BAKER.name, "peak_bytes", "FAIL", base=1000.0, head=1001.0)
ACCEPTED = Verdict(BAKER.name, "launches", "FAIL", base=7.0, head=8.0, accepted="two")
GONE = Verdict(ABLE.name, "row", "FAIL", reason="missing: no variant AbleLinear")
NOISY = timed(DOG.name, -0.01, 0.09, "INCONCLUSIVE")
FINE = timed(ABLE.name, 0.0004)
WHOLE = timed(MEAN, 0.004)
CONTROL = timed("control: 2 % more work | host", 0.02, status="FAIL")
RED = decision(FINE, SLOWER, HEAVIER, ACCEPTED, GONE, NOISY, WHOLE, controls=(CONTROL,), exit_code=1)
GREEN = decision(FINE, WHOLE, controls=(CONTROL,))
INVALID = decision(FINE, SLOWER, WHOLE, invalid=("the worker of head ended",), exit_code=3)


def test_a_decision_is_shown_with_the_worst_first() -> None:
    """The terminal leaves out cells whose time passes; Markdown has all rows, folded, and the machine."""
    text, page = report.text(RED), report.markdown(GREEN)
    header, _, *rows = [re.split(r" {2,}", line) for line in text.partition("\n\n")[0].splitlines()]
    assert [word for word in header if word] == [*filter(None, report.HEADINGS)]
    assert [row[2] for row in rows] == ["peak_bytes", "row", "time", "launches", "time", "time"]
    assert rows[0][2:] == ["peak_bytes", "1000 to 1001"]
    assert rows[1][2:] == ["row", "missing: no variant AbleLinear"]
    assert rows[2] == ["FAIL", BAKER.name, "time", "+2.13 %", "+1.73 %", "+2.53 %", "10"]
    assert rows[3][2:] == ["launches", "7 to 8", "accepted: two"]
    assert [row[0] for row in rows[4:]] == ["INCONCLUSIVE", "PASS"]
    assert text.endswith(
        "\n\nFAIL: aaaaaaaaaaaa against bbbbbbbbbbbb: 4 FAIL, 1 INCONCLUSIVE, 2 PASS, 1 of these accepted\n"
    )
    assert page.startswith("### esbench gate: PASS: aaaaaaaaaaaa against bbbbbbbbbbbb: 2 PASS\n")
    shown, _, folded = page.partition("<details><summary>all 3 rows</summary>")
    assert [shown.count(word) for word in ("geometric mean", ABLE.name, "| different |")] == [1, 0, 0]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:3]] for line in folded.splitlines()]
    assert [pair[0] for pair in cells if len(pair) == 2][2:] == [
        "PASS",
        "PASS",
        "different",
    ]  # after the header
    assert "On Test CPU, 2 threads, torch 2.13.0; suite gate, seed 0; " in folded
    machine = msgspec.structs.replace(GREEN.opening.environment, threads=1)
    opening = msgspec.structs.replace(GREEN.opening, environment=machine)
    assert "On Test CPU, 1 thread, " in report.markdown(msgspec.structs.replace(GREEN, opening=opening))


def test_github_shows_failures_that_are_not_accepted() -> None:
    """Each is one command, in which a percent sign is escaped."""
    lines = report.annotations(RED).splitlines()
    assert [line.count(": time: +2.13 %25: ") for line in lines] == [0, 0, 1]
    assert all(line.startswith("::error title=esbench gate::FAIL: ") for line in lines)
    assert report.annotations(INVALID).startswith(
        "::error title=esbench gate::INVALID: the worker of head ended\n"
    )
    assert report.annotations(GREEN) == ""


def test_the_headline_is_the_exit_code_in_a_word() -> None:
    """The headline counts verdicts of each kind; for an invalid gate it has the reason and any failure."""
    for verdict, code, word in ((FINE, 0, "PASS"), (SLOWER, 1, "FAIL"), (NOISY, 3, "INCONCLUSIVE")):
        line = report.headline(decision(verdict, exit_code=code))
        assert line == f"{word}: aaaaaaaaaaaa against bbbbbbbbbbbb: 1 {word}"
    assert "INVALID: the worker of head ended" in report.text(INVALID)
    assert "**INVALID: the worker of head ended**" in report.markdown(INVALID)
    assert report.headline(INVALID).startswith("INVALID: ")
    assert report.headline(msgspec.structs.replace(INVALID, exit_code=1)).startswith("FAIL: ")
    empty = decision(invalid=("no cell was measured in both arms",), exit_code=3)
    assert report.text(empty) == (
        "INVALID: no cell was measured in both arms\n\n"
        "INVALID: aaaaaaaaaaaa against bbbbbbbbbbbb: nothing was measured\n"
    )
    assert "|" not in report.markdown(empty)


def hostile(name: str) -> Decision:
    """Return a decision in which every name and text is this one."""
    rows = [msgspec.structs.replace(row, cell=name, reason=name) for row in (SLOWER, HEAVIER, GONE, NOISY)]
    rows.append(msgspec.structs.replace(ACCEPTED, cell=name, accepted=name or "x"))
    ordinary = decision(*rows, WHOLE, invalid=(name,), exit_code=1)
    machine = msgspec.structs.replace(ordinary.opening.environment, device_name=name)
    opening = msgspec.structs.replace(ordinary.opening, environment=machine, suite=name)
    return msgspec.structs.replace(ordinary, opening=opening)


@example("\u2028::error title=x::y")
@example("\x1b[31mred\x1b[0m\x07\x00 \u202e backwards \u200d")
@example("<script>alert(1)</script> </details> [click](http://evil.example)")
@example("\ud800 lone")
@example("x" * 200)
@given(st.text(alphabet=st.one_of(st.sampled_from("|\\\n\r:%<>`#@*_ "), st.characters())))
def test_a_hostile_name_stays_a_word(name: str) -> None:
    """A name cannot break a table or begin a line, or become a link, a tag or a GitHub command."""
    text, page = report.text(hostile(name)), report.markdown(hostile(name))
    lines = [*text.splitlines(), *page.splitlines()]
    assert text.count("\n") == report.text(RED).count("\n") + 2
    assert all(line.isprintable() for line in lines)
    assert not any(line.lstrip().startswith("::") for line in lines)
    for line in report.annotations(hostile(name)).splitlines():
        assert line.startswith("::error title=esbench gate::")
        assert line.isprintable()
    for line in page.splitlines():
        if line.startswith("| "):
            assert line.replace("\\\\", "").replace("\\|", "").count("|") == 9
    assert page.count("<details>") == page.count("</details>") == 1
    assert "<script" not in page.replace("\\<", "")
