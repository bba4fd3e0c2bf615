"""The decision rule: verdicts and exit code as functions of the evidence."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.gate.decision import MEAN, Evidence, exit_code
from esbench.gate.records import ARMS, MORE, SAME, Decision, Metric, Settings, Surveyed, Verdict, control_name
from tests.gate.gate_cases import (
    ABLE,
    BAKER,
    CELLS,
    CONTROLS,
    DOG,
    SETTINGS,
    cell,
    decided,
    evidence,
    replicates,
    spread,
    surveyed,
    surveys,
)

ALL = dict.fromkeys((cell.name for cell in CELLS), 0.0)
SLOWER = {BAKER.name: 0.02}
LOOKS_SLOWER = {BAKER.name: 0.02, DOG.name: -0.03}
"""A screen after which one cell must be confirmed, but not the mean."""


def time_of(decision: Decision, name: str = BAKER.name) -> tuple[str, str]:
    """Return status and code of the time verdict of a cell or of the mean."""
    (verdict,) = [
        verdict
        for verdict in decision.all_verdicts
        if verdict.cell == name and verdict.metric == "latency_ns"
    ]
    return verdict.status, verdict.code


def exact(*rows: Surveyed) -> list[tuple[str, str, str]]:
    """Return metric, status and code of the verdicts that follow from surveys alone."""
    verdicts = decided(Evidence(surveys=list(rows))).verdicts
    return [(verdict.metric, verdict.status, verdict.code) for verdict in verdicts]


def test_a_cell_that_new_replicates_show_to_be_slower_fails() -> None:
    """The effect is that of the confirmation, not of the screen; cells that are not slower pass."""
    gate = evidence({BAKER.name: 0.05, DOG.name: -0.06}, SLOWER)
    decision = decided(gate)
    assert (time_of(decision), decision.exit_code) == (("FAIL", "slower"), 1)
    assert [verdict.cell for verdict in decision.verdicts if verdict.status != "PASS"] == [BAKER.name]
    (bounds,) = [verdict.bounds for verdict in decision.verdicts if verdict.status == "FAIL"]
    assert bounds is not None
    assert bounds.effect == pytest.approx(0.02, abs=1e-6)
    assert (bounds.replicates, bounds.low > SETTINGS.margin) == (10, True)
    for share, code in ((0.0, "not-confirmed"), (0.004, "not-confirmed"), (0.006, "slower")):  # the margin
        assert time_of(decided(evidence(LOOKS_SLOWER, {BAKER.name: share})))[1] == code
    for margin in (0.0, 0.019, 0.021, 0.04):  # the control with 2 % more work must still be found
        strict = decided(evidence(LOOKS_SLOWER, SLOWER), settings=Settings(margin=margin))
        assert strict.invalid == ()
        assert (time_of(strict)[0], strict.exit_code) == (("FAIL", 1) if margin < 0.02 else ("PASS", 0)), (
            margin
        )
    # Verdicts do not depend on the order of surveys, replicates or cells.
    rng = random.Random(0)  # noqa: S311  # an order
    rng.shuffle(gate.surveys)
    gate.replicates = [
        msgspec.structs.replace(replicate, cells=tuple(rng.sample(replicate.cells, len(replicate.cells))))
        for replicate in reversed(gate.replicates)
    ]
    assert decided(gate).exit_code == 1
    assert {(verdict.cell, verdict.code) for verdict in decided(gate).verdicts} == {
        (verdict.cell, verdict.code) for verdict in decision.verdicts
    }


def test_all_suspects_and_only_suspects_are_confirmed() -> None:
    """Noisy cells are suspects too; one without new replicates is inconclusive, others keep their verdict."""
    noisy = evidence(screen_noise=0.5, confirm=ALL)
    assert noisy.cells_to_confirm(SETTINGS) == list(CELLS)
    assert {verdict.code for verdict in decided(noisy).verdicts} == {"not-confirmed"}
    still_noisy = decided(evidence(screen_noise=0.5, confirm=ALL, confirm_noise=0.5))
    assert {(verdict.status, verdict.code) for verdict in still_noisy.verdicts} == {("INCONCLUSIVE", "noisy")}
    gate = evidence(LOOKS_SLOWER)
    assert gate.cells_to_confirm(SETTINGS) == [BAKER]
    decision = decided(gate)
    assert (time_of(decision), decision.exit_code) == (("INCONCLUSIVE", "noisy"), 3)
    assert decision.invalid == (
        f"{BAKER.name}: 0 instead of 10 replicates of the confirmation were measured",
    )
    with_others = evidence(LOOKS_SLOWER, {**SLOWER, ABLE.name: 0.5})
    assert time_of(decided(with_others), ABLE.name) == ("PASS", "no-sign")
    gate = evidence(LOOKS_SLOWER, SLOWER)
    gate.replicates.append(msgspec.structs.replace(gate.replicates[-1], number=SETTINGS.confirm + 1))
    assert (
        f"{BAKER.name}: 11 instead of 10 replicates of the confirmation were measured"
        in decided(gate).invalid
    )
    assert decided(gate).exit_code == 3


def test_all_cells_are_confirmed_if_their_mean_looks_slower() -> None:
    """The mean needs new replicates of all cells, even if no single cell looks slower."""
    # Single cells are noisy, but the noise cancels in the mean.
    screen = {
        cell.name: [0.012 + shift * index for index in (-1, 0, 1)]
        for cell, shift in zip(CELLS, (0.012, -0.006, -0.0059), strict=True)
    }
    gate = evidence(confirm=dict.fromkeys(ALL, 0.012))
    controls = {name: spread(share, SETTINGS.screen) for name, share in CONTROLS.items()}
    gate.replicates[: SETTINGS.screen] = replicates("screen", {**screen, **controls})
    assert gate.cells_to_confirm(SETTINGS) == list(CELLS)
    assert (time_of(decided(gate), MEAN), decided(gate).exit_code) == (("FAIL", "slower"), 1)
    shares = dict.fromkeys(ALL, 0.012)
    some = decided(evidence(shares, {name: 0.012 for name in shares if name != BAKER.name}))
    assert time_of(some, MEAN) == ("INCONCLUSIVE", "noisy")
    assert f"{BAKER.name}: 0 instead of 10 replicates of the confirmation were measured" in some.invalid


def test_a_larger_family_is_tested_at_a_stricter_level() -> None:
    """A cell that would fail alone passes if a dozen others are confirmed with it."""
    noise = 0.0095
    many = [cell(f"C{index}") for index in range(12)]
    assert time_of(decided(evidence(SLOWER, {BAKER.name: 0.011}, confirm_noise=noise)))[1] == "slower"
    together = evidence(
        {**SLOWER, **{cell.name: 0.02 for cell in many}},
        {**{cell.name: 0.0 for cell in (*CELLS, *many)}, BAKER.name: 0.011},
        rows=surveys((*CELLS, *many)),
        confirm_noise=noise,
    )
    assert time_of(decided(together))[1] == "not-confirmed"


def test_rows_and_outputs_are_compared_exactly() -> None:
    """A row missing in head fails, and so does a wrong output of head, whether or not base is right.

    Only cells that both arms compute correctly are timed.
    """
    missing, wrong = [("row", "FAIL", "missing")], [("output", "FAIL", "wrong")]
    for base, head, expected in (
        ("ok", "ok", []),
        ("ok", "absent", missing),
        ("ok", "unavailable", missing),
        ("ok", "failed", wrong),
        ("absent", "ok", [("row", "PASS", "added")]),
        ("unavailable", "ok", [("row", "PASS", "added")]),
        ("absent", "failed", wrong),
        ("failed", "ok", [("output", "PASS", "wrong-base")]),
        ("failed", "failed", wrong),
        ("failed", "absent", missing),
        ("absent", "unavailable", []),
        ("unavailable", "absent", []),
    ):
        rows = [surveyed(ABLE, "base", base), surveyed(ABLE, "head", head, "why")]
        assert exact(*rows) == exact(*rows[::-1]) == expected, (base, head)
        assert Evidence(surveys=rows).timed_cells() == [ABLE] * (base == head == "ok")
        if expected == missing:
            assert decided(Evidence(surveys=rows)).verdicts[0].reason == "why"


def test_counts_are_compared_exactly() -> None:
    """One byte or launch more fails, fewer pass, and a count missing in head fails."""
    for metric in ("peak_bytes", "noise_bytes", "launches"):
        more = "more-launches" if metric == "launches" else "more-bytes"
        for before, after, expected in (
            (5, 5, []),
            (10**6, 10**6 + 1, [("FAIL", more)]),
            (0, 1, [("FAIL", more)]),
            (6, 5, [("PASS", "fewer")]),
            (5, None, [("FAIL", "missing")]),
            (None, 5, []),
        ):
            rows = [
                Surveyed(cell=ABLE, arm=arm, status="ok", figures={} if value is None else {metric: value})
                for arm, value in zip(ARMS, (before, after), strict=True)
            ]
            assert exact(*rows) == [(metric, *verdict) for verdict in expected], (metric, before, after)


def test_controls_that_misbehave_make_a_gate_invalid() -> None:
    """Equal work that differs, extra work that is not found, or an unmeasured control is a reason."""
    for same, more, reason in (
        (0.01, 0.02, "equal work differs between the arms (+1.00 %, at least"),
        (-0.01, 0.02, "equal work differs between the arms (-1.00 %, at least"),
        (0.0, 0.0, "2 % more work was not found"),
        (0.0, 0.004, "2 % more work was not found"),
        (0.0, -0.02, "2 % more work was not found"),
    ):
        shares = {control_name(SAME, "host"): same, control_name(MORE, "host"): more}
        decision = decided(evidence(SLOWER, SLOWER, controls=shares))
        assert decision.exit_code == 3
        assert any(reason in error for error in decision.invalid), reason
    # Cells timed by a graph need controls timed by a graph, and are then decided like others.
    graph = cell("Able", method="graph")
    rows = surveys((*CELLS, graph))
    decision = decided(evidence({graph.name: 0.0}, rows=rows))
    assert decision.exit_code == 3
    assert f"{SAME} | graph: 0 instead of 10 replicates of the confirmation were measured" in decision.invalid
    controls = {**CONTROLS, f"{SAME} | graph": 0.0, f"{MORE} | graph": 0.02}
    for slower, code in ((0.0, 0), (0.05, 1)):
        confirm = {graph.name: slower}
        gate = evidence({**confirm, DOG.name: -1.5 * slower}, confirm, rows=rows, controls=controls)
        assert decided(gate).exit_code == code


EXACT = st.sampled_from(["row", "output", "peak_bytes", "noise_bytes", "launches"])
VERDICTS = st.lists(
    st.builds(
        Verdict,
        cell=st.just("A"),
        metric=st.one_of(st.just("latency_ns"), EXACT),
        status=st.sampled_from(["PASS", "FAIL", "INCONCLUSIVE"]),
        code=st.just("slower"),
        accepted=st.sampled_from(["", "why"]),
    )
)


@given(VERDICTS, st.lists(st.just("why")), EXACT)
def test_nothing_bad_passes(verdicts: list[Verdict], invalid: list[str], metric: Metric) -> None:
    """Exit code 0 needs a valid gate in which every verdict passes or is waived; an exact failure makes it 1.

    A slower cell makes it 1 in a valid gate, also beside a noisy cell.
    """
    code = exit_code(verdicts, invalid)
    bad = [verdict for verdict in verdicts if verdict.status != "PASS" and not verdict.accepted]
    bad += [verdict for verdict in verdicts if verdict.status == "INCONCLUSIVE" and verdict.accepted]
    assert (code == 0) == (not bad and not invalid)
    failed = [verdict for verdict in bad if verdict.status == "FAIL"]
    is_exact = any(verdict.metric != "latency_ns" for verdict in failed)
    assert (code == 1) == (is_exact or bool(failed and not invalid))
    assert code in {0, 1, 3}
    worse = Verdict(cell="B", metric=metric, status="FAIL", code="missing")
    assert exit_code([*verdicts, worse], invalid) == 1
