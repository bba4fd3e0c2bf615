"""Changes that were intended: what gate.toml may say, what it accepts, and what it must not hide."""

import datetime as dt
from pathlib import Path

import msgspec
import pytest

from esbench.errors import UserError
from esbench.gate.decision import MEAN
from esbench.gate.records import Decision, Verdict
from esbench.gate.waivers import FILE, Waiver, apply, read
from tests.gate.gate_cases import ABLE, BAKER, bounds, judgement

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
    """An acceptance that has not expired."""
    return Waiver(cell=cell, metric=metric, reason=reason, expires=LATER)  # type: ignore[arg-type]  # a metric in each test


def written(folder: Path, text: str) -> tuple[Waiver, ...]:
    """What is read from such a file."""
    (folder / FILE).write_text(text, encoding="utf-8")
    return read(folder, TODAY)


def failed(*verdicts: Verdict, mean: Verdict | None = None, invalid: tuple[str, ...] = ()) -> Decision:
    """A judgement that ends with 1."""
    return judgement(*verdicts, mean=mean, invalid=invalid, exit_code=1)


def test_without_a_file_nothing_is_accepted(tmp_path: Path) -> None:
    """Nor by an empty one."""
    assert read(tmp_path, TODAY) == ()
    assert written(tmp_path, "") == ()


def test_an_acceptance_holds_through_its_last_day(tmp_path: Path) -> None:
    """On the day after, it is an error that names it."""
    (found,) = written(tmp_path, GOOD)
    assert found == Waiver(
        cell="Baker*", metric="latency_ns", reason="drawn in float64 from now on", expires=TODAY
    )
    with pytest.raises(UserError, match=r"the acceptance of latency_ns of Baker\* expired on 2026-03-01"):
        read(tmp_path, TODAY + dt.timedelta(days=1))


def test_one_that_expired_is_an_error_beside_others_that_did_not(tmp_path: Path) -> None:
    """Whatever their order."""
    old = GOOD.replace("2026-03-01", "2025-01-01").replace("Baker", "Old")
    for text in (GOOD + old, old + GOOD):
        with pytest.raises(UserError, match=r"Old\* expired on 2025-01-01: remove it"):
            written(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
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
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    """The file, and the field as far as it is one: nothing is skipped in silence."""
    assert old in GOOD
    with pytest.raises(UserError) as error:
        written(tmp_path, GOOD.replace(old, new))
    assert str(error.value).startswith("gate.toml: ")
    assert words in str(error.value)


def test_the_same_change_is_accepted_once(tmp_path: Path) -> None:
    """A second acceptance of it is an error; one for another kind of device is not the same."""
    with pytest.raises(UserError, match=r"latency_ns of Baker\* is accepted twice: remove one"):
        written(tmp_path, GOOD + GOOD)
    on_gpus = GOOD + 'device = "cuda"\n'
    assert [one.device for one in written(tmp_path, GOOD + on_gpus)] == [None, "cuda"]


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    """A folder of that name, or bytes that are no text."""
    (tmp_path / FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"gate\.toml"):
        read(tmp_path, TODAY)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    with pytest.raises(UserError, match=r"^gate\.toml: Is a directory$"):
        read(tmp_path, TODAY)


@pytest.mark.parametrize("name", [BAKER.name, "Baker*", "*Linear(4, 4)*forward*", "*"])
def test_an_acceptance_names_a_cell_or_a_glob_over_cells(name: str) -> None:
    """As the gate prints it; the judgement passes then, and says by which reason."""
    found = apply(failed(SLOWER, FINE), [accept(name)])
    assert found.exit_code == 0
    assert [one.accepted for one in found.verdicts] == ["meant to be", ""]


@pytest.mark.parametrize(
    ("verdict", "acceptance"),
    [
        (SLOWER, accept("Able*")),
        (SLOWER, accept("baker*")),
        (SLOWER, accept(metric="peak_bytes")),
        (HEAVIER, accept()),
        (HEAVIER, accept(metric="launches")),
        (GONE, accept()),
        (WRONG, accept()),
        (WRONG, accept(metric="row")),
    ],
)
def test_nothing_else_is_accepted(verdict: Verdict, acceptance: Waiver) -> None:
    """Neither another cell nor another metric; a wrong output never."""
    found = apply(failed(verdict), [acceptance])
    assert (found.exit_code, found.verdicts) == (1, (verdict,))


def test_rows_and_counts_can_be_accepted() -> None:
    """Each by the name of its metric; what else fails still does."""
    rules = [accept(metric="row"), accept(metric="peak_bytes")]
    assert apply(failed(GONE, HEAVIER), rules).exit_code == 0
    assert apply(failed(GONE, HEAVIER, SLOWER), rules).exit_code == 1


def test_the_mean_over_cells_is_accepted_by_its_own_name_alone() -> None:
    """A glob over cells does not reach it: what all have in common is another question."""
    one = failed(SLOWER, mean=WHOLE)
    assert apply(one, [accept()]).exit_code == 1
    accepted = apply(one, [accept(), accept(MEAN)])
    assert accepted.exit_code == 0
    assert accepted.mean is not None
    assert accepted.mean.accepted == "meant to be"


def test_neither_noise_nor_an_invalid_run_can_be_accepted() -> None:
    """There is nothing that was measured to be accepted."""
    assert apply(failed(NOISY), [accept()]).exit_code == 3
    assert apply(failed(SLOWER, invalid=("why",)), [accept()]).exit_code == 3


@pytest.mark.parametrize(("verdict", "code"), [(FINE, 2), (NOISY, 3), (WRONG, 1)])
def test_an_acceptance_that_accepts_nothing_is_an_error(verdict: Verdict, code: int) -> None:
    """It would hide the next regression; where the judgement has worse to say, that counts first."""
    rules = [accept("Baker*"), accept("Able*", "peak_bytes")]
    found = apply(judgement(verdict, exit_code=code), rules)
    assert found.exit_code == code
    assert [one.split(":")[:2] for one in found.unused] == [
        ["gate.toml", " nothing is accepted by latency_ns of Baker*"],
        ["gate.toml", " nothing is accepted by peak_bytes of Able*"],
    ]


def test_an_acceptance_for_another_kind_of_device_says_nothing_here() -> None:
    """It neither accepts nor is unused: one file serves a CPU and a GPU."""
    on_gpus = msgspec.structs.replace(accept(MEAN), device="cuda")
    assert apply(failed(FINE, mean=WHOLE), [on_gpus]).exit_code == 1
    assert apply(judgement(FINE), [on_gpus]).unused == ()
    here = msgspec.structs.replace(accept(MEAN), device="cpu")
    assert apply(failed(FINE, mean=WHOLE), [here]).exit_code == 0


def test_an_accepted_time_that_may_still_be_slower_is_in_use() -> None:
    """Chance decides whether a small slowdown is seen again: unused is what is shown not to be slower."""
    open_ = msgspec.structs.replace(FINE, bounds=bounds(0.002, half=0.01))
    assert apply(judgement(open_), [accept("Able*")]).unused == ()
    assert apply(judgement(FINE), [accept("Able*")]).unused != ()


def test_each_acceptance_has_to_accept_something() -> None:
    """One that does not is named, and not the one that does."""
    rules = [accept("Baker*"), accept("Charlie*")]
    found = apply(failed(SLOWER), rules)
    assert found.exit_code == 2
    (words,) = found.unused
    assert words.startswith("gate.toml: nothing is accepted by latency_ns of Charlie*: ")
    alone = apply(failed(SLOWER), rules[:1])
    assert (alone.exit_code, alone.unused) == (0, ())


def test_two_that_accept_the_same_are_both_in_use() -> None:
    """The first one's reason is shown."""
    rules = [accept("Baker*", reason="the first one"), accept(BAKER.name)]
    found = apply(failed(SLOWER), rules)
    assert found.verdicts[0].accepted == "the first one"
    assert (found.exit_code, found.unused) == (0, ())


@pytest.mark.parametrize(
    ("cell", "unused"),
    [("Able* | eager", False), ("Able* | graph", False), ("Able* | host", True), ("Able* | *", True)],
)
def test_what_was_not_measured_here_is_not_known_to_be_unused(cell: str, unused: bool) -> None:
    """One file serves a CPU and a GPU, which time by other methods."""
    found = apply(failed(FINE), [accept(cell)])
    assert (found.exit_code, bool(found.unused)) == (2 if unused else 0, unused)


def test_where_a_part_was_measured_nothing_is_known_to_be_unused() -> None:
    """As with some variants alone."""
    found = apply(failed(FINE), [accept("Baker*")], whole=False)
    assert (found.exit_code, found.unused) == (0, ())
