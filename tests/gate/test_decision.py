"""The rule of the gate: which verdict and which exit code follow from what was measured."""

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.gate import records
from esbench.gate.decision import MEAN, Evidence, exit_code, kept, timed_cells
from esbench.gate.protocol import ARMS
from esbench.gate.records import MORE, SAME, Decision, Metric, Status, Surveyed, Verdict
from tests.gate.gate_cases import (
    ABLE,
    BAKER,
    CELLS,
    CONTROLS,
    DOG,
    SETTINGS,
    cell,
    evidence,
    judged,
    replicates,
    spread,
    surveyed,
    surveys,
)

ALL = dict.fromkeys((one.name for one in CELLS), 0.0)
SLOWER = {BAKER.name: 0.02}
LOOKS_SLOWER = {BAKER.name: 0.02, DOG.name: -0.03}
"""A screen after which one cell must be confirmed, and not their mean."""


def found(judgement: Decision, name: str = BAKER.name) -> tuple[str, str]:
    """Status and code of the time of a cell, or of the mean."""
    rows = [*judgement.verdicts, *([judgement.mean] if judgement.mean else [])]
    (one,) = [row for row in rows if row.cell == name and row.metric == "latency_ns"]
    return one.status, one.code


def exact(*rows: Surveyed) -> list[tuple[str, str, str, str]]:
    """Cell, metric, status and code of what follows from surveys alone."""
    verdicts = judged(Evidence(surveys=list(rows))).verdicts
    return [(one.cell, one.metric, one.status, one.code) for one in verdicts]


def test_a_revision_against_itself_passes() -> None:
    """No sign of anything, in no cell and not in their mean; the controls do as they must."""
    judgement = judged(evidence())
    assert [one.code for one in judgement.verdicts] == ["no-sign"] * 3
    assert judgement.mean is not None
    assert (judgement.mean.code, judgement.exit_code, judgement.invalid) == ("no-sign", 0, ())
    assert [(one.cell, one.status) for one in judgement.controls] == [
        (f"{MORE} | host", "FAIL"),
        (f"{SAME} | host", "PASS"),
    ]


def test_what_new_replicates_bear_out_is_slower() -> None:
    """Its effect is theirs, not that of the screen that chose it; nobody else is blamed."""
    judgement = judged(evidence({BAKER.name: 0.05}, SLOWER))
    assert found(judgement) == ("FAIL", "slower")
    assert judgement.exit_code == 1
    assert [one.cell for one in judgement.verdicts if one.status != "PASS"] == [BAKER.name]
    (bounds,) = [one.bounds for one in judgement.verdicts if one.status == "FAIL"]
    assert bounds is not None
    assert bounds.effect == pytest.approx(0.02, abs=1e-6)
    assert (bounds.replicates, bounds.low > SETTINGS.margin) == (10, True)


@pytest.mark.parametrize(
    ("share", "code"), [(0.0, "not-confirmed"), (0.004, "not-confirmed"), (0.006, "slower")]
)
def test_a_slowdown_within_the_margin_is_none(share: float, code: str) -> None:
    """Half a percent, unless another margin was asked for."""
    assert found(judged(evidence(LOOKS_SLOWER, {BAKER.name: share})))[1] == code


def test_what_is_faster_passes() -> None:
    """Nobody asks for new replicates of it."""
    judgement = judged(evidence({BAKER.name: -0.1}))
    assert (found(judgement), judgement.exit_code) == (("PASS", "no-sign"), 0)


def test_a_cell_too_noisy_to_show_a_regression_is_inconclusive() -> None:
    """It is confirmed though it looks no slower, and no PASS where that does not help."""
    noisy = evidence(screen_noise=0.5, confirm=ALL, confirm_noise=0.5)
    assert [one.name for one in kept(noisy, CELLS, SETTINGS)] == [one.name for one in CELLS]
    judgement = judged(noisy)
    assert {(one.status, one.code) for one in judgement.verdicts} == {("INCONCLUSIVE", "noisy")}
    assert judgement.exit_code == 3


def test_noise_at_the_screen_alone_is_settled_by_new_replicates() -> None:
    """Whoever is quiet then passes."""
    judgement = judged(evidence(screen_noise=0.5, confirm=ALL))
    assert {one.code for one in judgement.verdicts} == {"not-confirmed"}
    assert judgement.exit_code == 0


def test_a_suspect_that_was_not_confirmed_is_no_pass() -> None:
    """The rule asked for replicates that there are not: inconclusive, invalid, and it says of whom."""
    judgement = judged(evidence(LOOKS_SLOWER))
    assert found(judgement) == ("INCONCLUSIVE", "noisy")
    assert judgement.exit_code == 3
    assert judgement.invalid == (f"{BAKER.name}: 0 of 10 replicates of the confirm",)


def test_only_suspects_are_confirmed() -> None:
    """The others keep their first verdict, whatever else was measured."""
    assert kept(evidence(LOOKS_SLOWER), CELLS, SETTINGS) == [BAKER]
    with_others = evidence(LOOKS_SLOWER, {**SLOWER, ABLE.name: 0.5})
    assert found(judged(with_others), ABLE.name) == ("PASS", "no-sign")


def test_all_cells_are_confirmed_where_their_mean_looks_slower() -> None:
    """Even if none of them does by itself: the mean is a member of the family."""
    # Each cell by itself is noisy, but what one has more of the other has less.
    screen = {
        name: [0.012 + shift * place for place in (-1, 0, 1)]
        for name, shift in ((CELLS[0].name, 0.012), (CELLS[1].name, -0.006), (CELLS[2].name, -0.0059))
    }
    confirm = {name: spread(0.012, 10) for name in ALL}
    controls = {name: spread(share, 10) for name, share in CONTROLS.items()}
    gate = Evidence(
        surveys=surveys(),
        replicates=[*replicates("screen", screen), *replicates("confirm", {**confirm, **controls})],
    )
    assert kept(gate, CELLS, SETTINGS) == list(CELLS)
    judgement = judged(gate)
    assert found(judgement, MEAN) == ("FAIL", "slower")
    assert judgement.exit_code == 1


def test_the_mean_is_not_judged_by_replicates_of_some_cells() -> None:
    """It looks slower, and one of its cells was not measured again: inconclusive."""
    shares = dict.fromkeys(ALL, 0.012)
    del shares[BAKER.name]
    judgement = judged(evidence(dict.fromkeys(ALL, 0.012), shares))
    assert found(judgement, MEAN) == ("INCONCLUSIVE", "noisy")
    assert f"{BAKER.name}: 0 of 10 replicates of the confirm" in judgement.invalid


def test_a_family_of_many_is_held_to_a_stricter_level() -> None:
    """What would be slower by itself is not where a dozen more were looked at."""
    noise = 0.0095
    many = [cell(f"C{place}") for place in range(12)]
    alone = evidence(SLOWER, {BAKER.name: 0.011}, confirm_noise=noise)
    assert found(judged(alone))[1] == "slower"
    together = evidence(
        {**SLOWER, **{one.name: 0.02 for one in many}},
        {**{one.name: 0.0 for one in (*CELLS, *many)}, BAKER.name: 0.011},
        rows=surveys((*CELLS, *many)),
        confirm_noise=noise,
    )
    assert found(judged(together))[1] == "not-confirmed"


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        (surveyed(ABLE, "base"), surveyed(ABLE, "head"), []),
        (surveyed(ABLE, "base"), surveyed(ABLE, "head", "absent", "gone"), [("row", "FAIL", "missing")]),
        (surveyed(ABLE, "base"), surveyed(ABLE, "head", "unavailable", "?"), [("row", "FAIL", "missing")]),
        (surveyed(ABLE, "base"), surveyed(ABLE, "head", "failed", "off"), [("output", "FAIL", "wrong")]),
        (surveyed(ABLE, "base", "absent"), surveyed(ABLE, "head"), [("row", "PASS", "added")]),
        (surveyed(ABLE, "base", "unavailable"), surveyed(ABLE, "head"), [("row", "PASS", "added")]),
        (surveyed(ABLE, "base", "absent"), surveyed(ABLE, "head", "failed"), [("output", "FAIL", "wrong")]),
        (surveyed(ABLE, "base", "failed"), surveyed(ABLE, "head"), [("output", "PASS", "wrong-base")]),
        (surveyed(ABLE, "base", "failed"), surveyed(ABLE, "head", "failed"), [("output", "FAIL", "wrong")]),
        (surveyed(ABLE, "base", "failed"), surveyed(ABLE, "head", "absent"), [("row", "FAIL", "missing")]),
        (surveyed(ABLE, "base", "absent"), surveyed(ABLE, "head", "unavailable"), []),
        (surveyed(ABLE, "base", "unavailable"), surveyed(ABLE, "head", "absent"), []),
    ],
    ids=lambda value: value.status if isinstance(value, Surveyed) else "",
)
def test_rows_that_come_or_go_need_no_statistics(
    base: Surveyed, head: Surveyed, expected: list[tuple[str, str, str]]
) -> None:
    """What base has and head has not fails, and so does what head computes wrongly, whatever base does."""
    assert exact(base, head) == [(ABLE.name, *one) for one in expected]
    assert exact(head, base) == [(ABLE.name, *one) for one in expected]


def test_a_row_says_why_it_has_no_number() -> None:
    """In the words of the arm that lacks it; an arm that was not asked has none."""
    rows = (
        surveyed(ABLE, "base"),
        surveyed(ABLE, "head", "absent", "no variant Able"),
        surveyed(BAKER, "base"),
    )
    reasons = [one.reason for one in judged(Evidence(surveys=list(rows))).verdicts]
    assert reasons == ["no variant Able", "it was not asked"]
    assert exact(surveyed(ABLE, "head")) == [(ABLE.name, "row", "PASS", "added")]


@pytest.mark.parametrize("metric", ["peak_bytes", "noise_bytes", "launches"])
@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (5, 5, []),
        (10**6, 10**6 + 1, [("FAIL", "more")]),
        (0, 1, [("FAIL", "more")]),
        (6, 5, [("PASS", "fewer")]),
        (5, None, [("FAIL", "missing")]),
        (None, 5, []),
        (None, None, []),
    ],
)
def test_counts_are_exact(
    metric: str, before: float | None, after: float | None, expected: list[tuple[str, str]]
) -> None:
    """One more fails, one less is told; a count that head has lost is none of its merits."""
    rows = [
        Surveyed(cell=ABLE, arm=arm, status="ok", figures={} if value is None else {metric: value})
        for arm, value in zip(ARMS, (before, after), strict=True)
    ]
    more = "more-launches" if metric == "launches" else "more-bytes"
    assert exact(*rows) == [
        (ABLE.name, metric, status, more if code == "more" else code) for status, code in expected
    ]


def test_a_wrong_or_missing_row_is_not_timed() -> None:
    """Only what both arms have and compute rightly is."""
    rows = [
        *surveys(),
        surveyed(cell("X"), "base"),
        surveyed(cell("X"), "head", "absent"),
        surveyed(cell("Y"), "base", "failed"),
        surveyed(cell("Y"), "head"),
        surveyed(cell("Z"), "head"),
    ]
    assert timed_cells(rows) == list(CELLS)


FAIL_TIME, FAIL_ROW = ("FAIL", "latency_ns"), ("FAIL", "row")
NOISY, FINE = ("INCONCLUSIVE", "latency_ns"), ("PASS", "latency_ns")


@pytest.mark.parametrize(
    ("verdicts", "invalid", "code"),
    [
        ([], (), 0),
        ([FINE], (), 0),
        ([FINE], ("why",), 3),
        ([NOISY], (), 3),
        ([FAIL_TIME], (), 1),
        ([FAIL_TIME], ("why",), 3),
        ([FAIL_TIME, NOISY], (), 1),
        ([FAIL_TIME, NOISY], ("why",), 3),
        ([FAIL_ROW], (), 1),
        ([FAIL_ROW], ("why",), 1),
        ([FAIL_ROW, NOISY, FAIL_TIME], ("why",), 1),
        ([("FAIL", "output")], ("why",), 1),
        ([("FAIL", "peak_bytes")], ("why",), 1),
        ([("FAIL", "launches"), NOISY], ("why",), 1),
    ],
)
def test_what_is_certain_is_hidden_by_nothing(
    verdicts: Sequence[tuple[Status, Metric]], invalid: tuple[str, ...], code: int
) -> None:
    """A count, a row or an output that fails is 1 even where times decide nothing; a time is not then."""
    rows = [Verdict(cell="A", metric=metric, status=status, code="slower") for status, metric in verdicts]
    for order in itertools.permutations(rows):
        assert exit_code(order, invalid) == code
    accepted = [msgspec.structs.replace(one, accepted="meant") for one in rows if one.status == "FAIL"]
    assert exit_code([one for one in rows if one.status != "FAIL"] + accepted, invalid) in {0, 3}


SURELY = st.sampled_from(["row", "output", "peak_bytes", "noise_bytes", "launches"])
VERDICTS = st.lists(
    st.builds(
        Verdict,
        cell=st.just("A"),
        metric=st.one_of(st.just("latency_ns"), SURELY),
        status=st.sampled_from(["PASS", "FAIL", "INCONCLUSIVE"]),
        code=st.just("slower"),
        accepted=st.sampled_from(["", "meant"]),
    )
)


@given(VERDICTS, st.lists(st.just("why")), SURELY)
def test_nothing_bad_passes(verdicts: list[Verdict], invalid: list[str], metric: Metric) -> None:
    """Exit code 0 is for verdicts that pass or were accepted, of times that count; one failure more is 1."""
    code = exit_code(verdicts, invalid)
    bad = [one for one in verdicts if one.status != "PASS" and not (one.status == "FAIL" and one.accepted)]
    assert (code == 0) == (not bad and not invalid)
    assert code in {0, 1, 3}
    worse = Verdict(cell="B", metric=metric, status="FAIL", code="missing")
    assert exit_code([*verdicts, worse], invalid) == 1


@pytest.mark.parametrize("stage", ["screen", "confirm"])
@pytest.mark.parametrize("more", [-1, 1], ids=["missing", "extra"])
def test_a_replicate_too_few_or_too_many_makes_a_gate_invalid(stage: str, more: int) -> None:
    """Of one cell, at either stage; it says how many there are of how many."""
    gate = evidence(SLOWER, SLOWER)
    count = {"screen": SETTINGS.screen, "confirm": SETTINGS.confirm}[stage]
    last = [one for one in gate.replicates if one.stage == stage][-1]
    if more > 0:
        gate.replicates.append(msgspec.structs.replace(last, number=count + 1))
    else:
        others = tuple(one for one in last.cells if one.cell != BAKER.name)
        gate.replicates[gate.replicates.index(last)] = msgspec.structs.replace(last, cells=others)
    judgement = judged(gate)
    assert judgement.exit_code == 3
    assert f"{BAKER.name}: {count + more} of {count} replicates of the {stage}" in judgement.invalid
    assert not any(one.status == "FAIL" for one in judgement.verdicts)


def test_a_gate_that_measured_nothing_is_invalid() -> None:
    """Nor does it pass where no cell is in both arms."""
    assert judged(Evidence()).exit_code == 3
    lone = judged(Evidence(surveys=[surveyed(ABLE, "head"), surveyed(ABLE, "base", "absent")]))
    assert (lone.exit_code, lone.invalid) == (3, ("no cell was measured in both arms",))


def test_what_went_wrong_outside_is_a_reason_too() -> None:
    """A worker that was killed, for instance: what is slower is then not certain."""
    judgement = judged(evidence(SLOWER, SLOWER), "the worker of head ended")
    assert (judgement.exit_code, judgement.invalid) == (3, ("the worker of head ended",))
    assert found(judgement) == ("FAIL", "slower")


@given(st.randoms(use_true_random=False))
def test_the_order_of_what_was_measured_changes_no_verdict(rng: random.Random) -> None:
    """Neither that of the replicates, nor that of the cells in them, nor that of the surveys."""
    gate = evidence({BAKER.name: 0.05}, SLOWER)
    straight = judged(gate)
    rng.shuffle(gate.surveys)
    rng.shuffle(gate.replicates)
    gate.replicates = [
        msgspec.structs.replace(one, cells=tuple(rng.sample(one.cells, len(one.cells))))
        for one in gate.replicates
    ]
    mixed = judged(gate)
    assert (mixed.exit_code, mixed.invalid) == (straight.exit_code, straight.invalid)
    assert {(one.cell, one.code) for one in mixed.verdicts} == {
        (one.cell, one.code) for one in straight.verdicts
    }


def test_a_judgement_can_be_read_back() -> None:
    """As it stands in gate.json, and it says by which rule and what was compared."""
    judgement = judged(
        evidence(SLOWER, SLOWER, rows=[*surveys(), surveyed(cell("X"), "head", peak_bytes=1.0)])
    )
    again = msgspec.json.decode(msgspec.json.encode(judgement), type=records.Decision)
    assert again == judgement
    assert again.opening.revisions["head"].asked == "HEAD"
    assert again.settings == SETTINGS
