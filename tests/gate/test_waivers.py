"""Waivers: the contents of gate.toml, the verdicts that it accepts, and what it must not hide."""

import datetime as dt
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from esbench.errors import UserError
from esbench.gate.decision import exit_code
from esbench.gate.records import MEAN, Verdict
from esbench.gate.waivers import FILE, Waiver, accept, read, unused_waivers
from tests.gate.gate_cases import ABLE, BAKER, SETTINGS, timed

TODAY = dt.date(2026, 3, 1)
SLOWER = timed(BAKER.name, 0.02, status="FAIL")
WHOLE = timed(MEAN, 0.02, status="FAIL")
HEAVIER = Verdict(BAKER.name, "peak_bytes", "FAIL", base=1, head=2)
GONE = Verdict(ABLE.name, "row", "FAIL", reason="missing: no variant Able")
WRONG = Verdict(ABLE.name, "output", "FAIL", reason="wrong result: off")
NOISY = timed(ABLE.name, 0.0, status="INCONCLUSIVE")
FINE = timed(ABLE.name, 0.0)
GOOD = """
[[accept]]
cell = "Baker*"
metric = "latency_ns"
reason = "drawn in float64 from now on"
expires = 2026-03-01
"""


def waiver(cell: str = "*", metric: str = "latency_ns", reason: str = "meant to be") -> Waiver:
    """Return a waiver that has not expired."""
    return Waiver(cell=cell, metric=metric, reason=reason, expires=TODAY)  # type: ignore[arg-type]  # a metric in each test


def outcome(
    waivers: Sequence[Waiver], *verdicts: Verdict, invalid: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """Return the exit code of these verdicts with waivers, and why each verdict is accepted."""
    accepted = [accept(verdict, waivers) for verdict in verdicts]
    return exit_code(accepted, invalid, unused=()), [verdict.accepted for verdict in accepted]


def unused(waivers: Sequence[Waiver], *verdicts: Verdict) -> list[str]:
    """Return the waivers that apply to nothing."""
    return [
        error.partition(" applies to nothing: remove it")[0]
        for error in unused_waivers(waivers, verdicts, SETTINGS.margin)
    ]


def test_a_waiver_holds_through_its_last_day(tmp_path: Path) -> None:
    """An expired waiver is an error that names it; a missing file means no waivers."""
    assert read(tmp_path, TODAY) == ()
    file = tmp_path / FILE
    file.write_text(GOOD, encoding="utf-8-sig")  # with the byte order mark of an editor
    assert len(read(tmp_path, TODAY)) == 1
    old = GOOD.replace("2026-03-01", "2026-02-28").replace("Baker", "Old")
    for text in (GOOD + old, old + GOOD):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"waiver for latency_ns of Old\* expired on 2026-02-28: remove"):
            read(tmp_path, TODAY)


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    """The error has the file and the field, if any."""
    for old, new, words in (
        ('cell = "Baker*"', 'cell = ""', "length >= 1"),
        ('cell = "Baker*"', "", "missing required field `cell`"),
        ('"latency_ns"', '"output"', "Invalid enum value 'output'"),
        ('"drawn in float64 from now on"', '"because"', "matching regex"),
        ('"drawn in float64 from now on"', '"            "', "matching regex"),
        ("expires = 2026-03-01", "", "missing required field `expires`"),
        ("2026-03-01", '"never"', "Expected `date`"),
        ("[[accept]]", "[[accepted]]", "unknown field `accepted`"),
        ("expires", "until", "unknown field `until`"),
        (GOOD, "\0", ""),
        (GOOD, f"accept = {10_000 * '['}", "recursion"),
        ("2026-03-01", "9999-12-31", "Baker* expires on 9999-12-31: choose a date within 366 days"),
    ):
        assert old in GOOD
        (tmp_path / FILE).write_text(GOOD.replace(old, new), encoding="utf-8")
        with pytest.raises(UserError) as error:
            read(tmp_path, TODAY)
        assert str(error.value).startswith("gate.toml"), new
        assert words in str(error.value), new
    (tmp_path / FILE).unlink()
    os.mkfifo(tmp_path / FILE)  # reading from a pipe would never end
    with pytest.raises(UserError, match=r"gate\.toml cannot be read: it is not a regular file"):
        read(tmp_path, TODAY)


def test_a_waiver_accepts_only_its_cells_and_metric() -> None:
    """A waiver never accepts another cell or metric, a wrong output, noise or an invalid gate."""
    for name in (BAKER.name, "Baker*", "*Linear(4, 4)*forward*", "*"):
        assert outcome([waiver(name)], SLOWER, FINE) == (0, ["meant to be", ""])
    for verdict, other in (
        (SLOWER, waiver("Able*")),
        (SLOWER, waiver("baker*")),
        (HEAVIER, waiver()),
        (HEAVIER, waiver(metric="launches")),
        (GONE, waiver()),
        (WRONG, waiver(metric="row")),
    ):
        assert outcome([other], verdict) == (1, [""]), other
    rules = [waiver(metric="row"), waiver(metric="peak_bytes")]
    assert outcome(rules, GONE, HEAVIER)[0] == 0
    assert outcome(rules, GONE, HEAVIER, SLOWER)[0] == 1
    assert outcome([waiver()], NOISY)[0] == 3
    assert outcome([waiver()], SLOWER, invalid=("why",))[0] == 3
    # A glob over cells does not match their mean, which can be waived only by name.
    assert outcome([waiver()], SLOWER, WHOLE) == (1, ["meant to be", ""])
    assert outcome([waiver(), waiver(MEAN)], SLOWER, WHOLE) == (0, ["meant to be"] * 2)
    # If two waivers match, the first is shown.
    assert outcome([waiver("Baker*", reason="the first one"), waiver()], SLOWER) == (0, ["the first one"])


def test_a_waiver_that_applies_to_nothing_is_unused() -> None:
    """It would hide the next regression. A time that may be slower than the margin uses its waiver."""
    rules = [waiver("Baker*"), waiver("Able*", "peak_bytes")]
    for verdict in (FINE, NOISY, WRONG):
        assert unused(rules, verdict) == [
            "gate.toml: the waiver for latency_ns of Baker*",
            "gate.toml: the waiver for peak_bytes of Able*",
        ]
    assert unused([waiver("Baker*"), waiver(BAKER.name)], SLOWER) == []
    for half, count in ((0.002, 1), (0.01, 0)):  # a small slowdown is found only by chance
        assert len(unused([waiver("Able*")], timed(ABLE.name, 0.002, half))) == count
    # Waivers for the methods of a GPU are ignored on a CPU.
    for cell, count in (("Able* | eager", 0), ("Able* | graph", 0), ("Able* | host", 1), ("Able* | *", 1)):
        assert len(unused([waiver(cell)], FINE)) == count, cell
