"""Waivers: the contents of gate.toml, the verdicts that it accepts, and what it must not hide."""

import datetime as dt
import os
from functools import partial
from pathlib import Path

import pytest

from esbench.errors import UserError
from esbench.gate.decision import MEAN
from esbench.gate.records import Verdict
from esbench.gate.waivers import FILE, Waiver, apply, read
from tests.gate.gate_cases import ABLE, BAKER, timed
from tests.gate.gate_cases import decision as decision_of

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


def accept(cell: str = "*", metric: str = "latency_ns", reason: str = "meant to be") -> Waiver:
    """Return a waiver that has not expired."""
    return Waiver(cell=cell, metric=metric, reason=reason, expires=TODAY)  # type: ignore[arg-type]  # a metric in each test


failed = partial(decision_of, exit_code=1)


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
        decision = apply(failed(SLOWER, FINE), [accept(name)])
        assert decision.exit_code == 0
        assert [verdict.accepted for verdict in decision.verdicts] == ["meant to be", ""]
    for verdict, waiver in (
        (SLOWER, accept("Able*")),
        (SLOWER, accept("baker*")),
        (HEAVIER, accept()),
        (HEAVIER, accept(metric="launches")),
        (GONE, accept()),
        (WRONG, accept(metric="row")),
    ):
        decision = apply(failed(verdict), [waiver])
        assert (decision.exit_code, decision.verdicts) == (1, (verdict,)), waiver
    rules = [accept(metric="row"), accept(metric="peak_bytes")]
    assert apply(failed(GONE, HEAVIER), rules).exit_code == 0
    assert apply(failed(GONE, HEAVIER, SLOWER), rules).exit_code == 1
    assert apply(failed(NOISY), [accept()]).exit_code == 3
    assert apply(failed(SLOWER, invalid=("why",)), [accept()]).exit_code == 3
    # A glob over cells does not match their mean, which can be waived only by name.
    assert apply(failed(SLOWER, mean=WHOLE), [accept()]).exit_code == 1
    decision = apply(failed(SLOWER, mean=WHOLE), [accept(), accept(MEAN)])
    assert decision.mean is not None
    assert (decision.exit_code, decision.mean.accepted) == (0, "meant to be")


def test_an_unused_waiver_is_an_error() -> None:
    """An unused waiver would hide the next regression; it does not lower a worse exit code."""
    rules = [accept("Baker*"), accept("Able*", "peak_bytes")]
    for verdict, code in ((FINE, 2), (NOISY, 3), (WRONG, 1)):
        decision = apply(decision_of(verdict, exit_code=code), rules)
        assert decision.exit_code == code
        assert decision.unused == (
            "gate.toml: the waiver for latency_ns of Baker* applies to nothing: remove it",
            "gate.toml: the waiver for peak_bytes of Able* applies to nothing: remove it",
        )
    # If two waivers match, the first is shown and neither is unused.
    rules = [accept("Baker*", reason="the first one"), accept(BAKER.name), accept("Charlie*")]
    decision = apply(failed(SLOWER), rules)
    assert (decision.exit_code, len(decision.unused), decision.verdicts[0].accepted) == (
        2,
        1,
        "the first one",
    )
    # A small slowdown is found only by chance, so any time that may be slower uses its waiver.
    assert apply(decision_of(timed(ABLE.name, 0.002, half=0.01)), [accept("Able*")]).unused == ()


def test_a_waiver_for_an_unmeasured_cell_is_not_unused() -> None:
    """A waiver for another method or variant is ignored if the gate did not measure it."""
    for cell, unused in (("Able* | eager", 0), ("Able* | graph", 0), ("Able* | host", 1), ("Able* | *", 1)):
        assert len(apply(failed(FINE), [accept(cell)]).unused) == unused, cell
    assert apply(failed(FINE), [accept("Baker*")], whole=False).unused == ()
