"""Waivers: what gate.toml may contain, what it accepts, and what it must not hide."""

import datetime as dt
from pathlib import Path

import msgspec
import pytest

from esbench.errors import UserError
from esbench.gate.decision import MEAN
from esbench.gate.records import Decision, Verdict
from esbench.gate.waivers import FILE, Waiver, apply, read
from tests.gate.gate_cases import ABLE, BAKER, bounds, decision

TODAY = dt.date(2026, 3, 1)
LATER = dt.date(2026, 4, 1)
SLOWER = Verdict(cell=BAKER.name, metric="latency_ns", status="FAIL", code="slower", bounds=bounds(0.02))
HEAVIER = Verdict(cell=BAKER.name, metric="peak_bytes", status="FAIL", code="more-bytes", base=1, head=2)
GONE = Verdict(cell=ABLE.name, metric="row", status="FAIL", code="missing", reason="no variant Able")
WRONG = Verdict(cell=ABLE.name, metric="output", status="FAIL", code="wrong", reason="oracle: off")
NOISY = Verdict(cell=ABLE.name, metric="latency_ns", status="INCONCLUSIVE", code="noisy", bounds=bounds(0))
FINE = Verdict(cell=ABLE.name, metric="latency_ns", status="PASS", code="no-sign", bounds=bounds(0.0))
WHOLE = Verdict(cell=MEAN, metric="latency_ns", status="FAIL", code="slower", bounds=bounds(0.02))
GOOD = """
[[accept]]
cell = "Baker*"
metric = "latency_ns"
reason = "drawn in float64 from now on"
expires = 2026-03-01
"""


def accept(cell: str = "*", metric: str = "latency_ns", reason: str = "meant to be") -> Waiver:
    """A waiver that has not expired."""
    return Waiver(cell=cell, metric=metric, reason=reason, expires=LATER)  # type: ignore[arg-type]  # a metric in each test


def written(folder: Path, text: str) -> tuple[Waiver, ...]:
    """What is read from such a file."""
    (folder / FILE).write_text(text, encoding="utf-8")
    return read(folder, TODAY)


def failed(*verdicts: Verdict, mean: Verdict | None = None, invalid: tuple[str, ...] = ()) -> Decision:
    """A decision with exit code 1."""
    return decision(*verdicts, mean=mean, invalid=invalid, exit_code=1)


def test_a_waiver_holds_through_its_last_day(tmp_path: Path) -> None:
    """Afterwards it is an error that names it, also beside others; without a file there is none."""
    assert read(tmp_path, TODAY) == ()
    assert written(tmp_path, "") == ()
    (found,) = written(tmp_path, GOOD)
    assert found == Waiver(
        cell="Baker*", metric="latency_ns", reason="drawn in float64 from now on", expires=TODAY
    )
    with pytest.raises(UserError, match=r"the waiver for latency_ns of Baker\* expired on 2026-03-01"):
        read(tmp_path, TODAY + dt.timedelta(days=1))

    old = GOOD.replace("2026-03-01", "2025-01-01").replace("Baker", "Old")
    for text in (GOOD + old, old + GOOD):
        with pytest.raises(UserError, match=r"Old\* expired on 2025-01-01: remove it"):
            written(tmp_path, text)


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    """With the file and the field, if there is one; the same waiver twice, too."""
    for old, new, words in (
        ('cell = "Baker*"', "cell = 3", "Expected `str`"),
        ('cell = "Baker*"', 'cell = ""', "length >= 1"),
        ('cell = "Baker*"', "", "missing required field `cell`"),
        ('"latency_ns"', '"output"', "Invalid enum value 'output'"),
        ('"latency_ns"', '"*"', "Invalid enum value"),
        ('"drawn in float64 from now on"', '"because"', "matching regex"),
        ('"drawn in float64 from now on"', '"            "', "matching regex"),
        ("expires", 'device = "tpu"\nexpires', "Invalid enum value 'tpu'"),
        ('reason = "drawn in float64 from now on"', "", "missing required field `reason`"),
        ("expires = 2026-03-01", "", "missing required field `expires`"),
        ("2026-03-01", '"never"', "Expected `date`"),
        ("2026-03-01", "2026-02-30", ""),
        ("[[accept]]", "[[accepted]]", "unknown field `accepted`"),
        ("expires", "until", "unknown field `until`"),
        ("[[accept]]", "[[accept]", ""),
        (GOOD, "accept = 3", "Expected `array`"),
        (GOOD, "\0", ""),
        (GOOD, GOOD + GOOD, "latency_ns of Baker* is listed twice: remove one"),
    ):
        assert old in GOOD
        with pytest.raises(UserError) as error:
            written(tmp_path, GOOD.replace(old, new))
        assert str(error.value).startswith("gate.toml: "), new
        assert words in str(error.value), new
    on_gpus = GOOD + 'device = "cuda"\n'
    assert [one.device for one in written(tmp_path, GOOD + on_gpus)] == [None, "cuda"]
    (tmp_path / FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"gate\.toml"):
        read(tmp_path, TODAY)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    with pytest.raises(UserError, match=r"^gate\.toml: Is a directory$"):
        read(tmp_path, TODAY)


def test_a_waiver_names_a_cell_or_a_glob_over_cells() -> None:
    """The decision passes then, and gives the reason; the first of two waivers is shown, both are in use."""
    for name in (BAKER.name, "Baker*", "*Linear(4, 4)*forward*", "*"):
        found = apply(failed(SLOWER, FINE), [accept(name)])
        assert found.exit_code == 0
        assert [one.accepted for one in found.verdicts] == ["meant to be", ""]
    rules = [accept("Baker*", reason="the first one"), accept(BAKER.name)]
    found = apply(failed(SLOWER), rules)
    assert found.verdicts[0].accepted == "the first one"
    assert (found.exit_code, found.unused) == (0, ())


def test_a_waiver_accepts_nothing_else() -> None:
    """Neither another cell or metric, nor a wrong output, noise or an invalid gate."""
    for verdict, waiver in (
        (SLOWER, accept("Able*")),
        (SLOWER, accept("baker*")),
        (SLOWER, accept(metric="peak_bytes")),
        (HEAVIER, accept()),
        (HEAVIER, accept(metric="launches")),
        (GONE, accept()),
        (WRONG, accept()),
        (WRONG, accept(metric="row")),
    ):
        found = apply(failed(verdict), [waiver])
        assert (found.exit_code, found.verdicts) == (1, (verdict,)), waiver
    rules = [accept(metric="row"), accept(metric="peak_bytes")]
    assert apply(failed(GONE, HEAVIER), rules).exit_code == 0
    assert apply(failed(GONE, HEAVIER, SLOWER), rules).exit_code == 1
    assert apply(failed(NOISY), [accept()]).exit_code == 3
    assert apply(failed(SLOWER, invalid=("why",)), [accept()]).exit_code == 3


def test_the_mean_over_cells_is_waived_by_its_name_alone() -> None:
    """A glob over cells does not match it."""
    one = failed(SLOWER, mean=WHOLE)
    assert apply(one, [accept()]).exit_code == 1
    accepted = apply(one, [accept(), accept(MEAN)])
    assert accepted.exit_code == 0
    assert accepted.mean is not None
    assert accepted.mean.accepted == "meant to be"


def test_an_unused_waiver_is_an_error() -> None:
    """It would hide the next regression; an exit code that is worse stays. Only unused ones are named."""
    rules = [accept("Baker*"), accept("Able*", "peak_bytes")]
    for verdict, code in ((FINE, 2), (NOISY, 3), (WRONG, 1)):
        found = apply(decision(verdict, exit_code=code), rules)
        assert found.exit_code == code
        assert found.unused == (
            "gate.toml: the waiver for latency_ns of Baker* applies to nothing: remove it",
            "gate.toml: the waiver for peak_bytes of Able* applies to nothing: remove it",
        )
    found = apply(failed(SLOWER), [accept("Baker*"), accept("Charlie*")])
    assert found.exit_code == 2
    assert [one.split(":")[1] for one in found.unused] == [
        " the waiver for latency_ns of Charlie* applies to nothing"
    ]
    # Whether a small slowdown is found again depends on chance: a time that may be slower uses its waiver.
    may_be_slower = msgspec.structs.replace(FINE, bounds=bounds(0.002, half=0.01))
    assert apply(decision(may_be_slower), [accept("Able*")]).unused == ()


def test_a_waiver_for_what_was_not_measured_is_not_unused() -> None:
    """Another device, another method, or a gate of some variants only."""
    on_gpus = msgspec.structs.replace(accept(MEAN), device="cuda")
    assert apply(failed(FINE, mean=WHOLE), [on_gpus]).exit_code == 1
    assert apply(decision(FINE), [on_gpus]).unused == ()
    here = msgspec.structs.replace(accept(MEAN), device="cpu")
    assert apply(failed(FINE, mean=WHOLE), [here]).exit_code == 0
    for cell, unused in (("Able* | eager", 0), ("Able* | graph", 0), ("Able* | host", 1), ("Able* | *", 1)):
        assert len(apply(failed(FINE), [accept(cell)]).unused) == unused, cell
    assert apply(failed(FINE), [accept("Baker*")], whole=False).unused == ()
