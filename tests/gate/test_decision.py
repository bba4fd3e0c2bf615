"""The decision rule: verdicts and exit code as functions of the evidence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.gate.decision import Evidence, bounds, exit_code, mean_over_cells, open_names, trimmed
from esbench.gate.gate import timed_cells
from esbench.gate.records import ARMS, MEAN, MORE, SAME, Decision, Metric, Settings, Surveyed, Verdict
from tests.gate.gate_cases import (
    ABLE,
    BAKER,
    CELLS,
    CONTROLS,
    OPENING,
    QUIET,
    SETTINGS,
    cell,
    decided,
    evidence,
    surveyed,
    surveys,
)

SLOWER = {BAKER.name: 0.02}


def time_of(decision: Decision, name: str = BAKER.name) -> str:
    """Return the status of the time verdict of a cell or of the mean."""
    times = [verdict for verdict in decision.verdicts if verdict.metric == "latency_ns"]
    (status,) = [verdict.status for verdict in times if verdict.cell == name]
    return status


def exact(*rows: Surveyed) -> list[tuple[str, str, str]]:
    """Return metric, status and reason of the verdicts that follow from surveys alone."""
    verdicts = decided(Evidence(OPENING, rows, {})).verdicts
    return [(verdict.metric, verdict.status, verdict.reason) for verdict in verdicts]


def test_a_cell_that_is_shown_to_be_slower_fails() -> None:
    """The margin is tolerated, and the other cells pass; verdicts do not depend on the order of evidence."""
    gate = evidence(SLOWER)
    decision = decided(gate)
    assert (time_of(decision), decision.exit_code) == ("FAIL", 1)
    slower, mean = (verdict for verdict in decision.verdicts if verdict.status != "PASS")
    assert (slower.cell, mean.cell) == (BAKER.name, MEAN)
    assert slower.bounds is not None
    assert slower.bounds.effect == pytest.approx(0.02, abs=1e-6)
    assert (slower.bounds.replicates, slower.bounds.low > SETTINGS.margin) == (SETTINGS.looks[0], True)
    for share, status in ((0.0, "PASS"), (0.0048, "PASS"), (0.0052, "FAIL")):  # the margin
        assert time_of(decided(evidence({BAKER.name: share}))) == status
    for margin in (0.0, 0.019, 0.021, 0.04):  # the control with 2 % more work must still be found
        strict = decided(gate, Settings(margin=margin))
        assert strict.invalid == ()
        expected = ("FAIL", 1) if margin < 0.02 else ("PASS", 0)
        assert (time_of(strict), strict.exit_code) == expected, margin
    gate.surveys = gate.surveys[::-1]
    gate.log_ratios = {name: [new[::-1] for new in looks] for name, looks in gate.log_ratios.items()}
    assert decided(gate).verdicts == decision.verdicts


def test_only_undecided_cells_get_more_replicates() -> None:
    """A cell ends when it is shown to be slower or hardly slower; one that stays noisy is inconclusive."""
    names = [cell.name for cell in CELLS]
    for looks, noise, expected in (
        (0, QUIET, [*names, *CONTROLS]),
        (1, QUIET, []),
        (1, 0.06, names),
        (3, 0.06, []),
        (3, 1.0, []),
    ):
        gate = evidence(SLOWER, noise=noise, looks=looks)
        assert open_names(gate.log_ratios, SETTINGS) == expected, (looks, noise)
    unfinished = decided(evidence(SLOWER, noise=0.06, looks=1))
    assert (time_of(unfinished), unfinished.exit_code) == ("INCONCLUSIVE", 3)
    assert {verdict.cell: verdict.status for verdict in decided(evidence(SLOWER, noise=0.06)).verdicts} == {
        **dict.fromkeys((*names, MEAN), "PASS"),
        BAKER.name: "FAIL",
    }
    noisy = decided(evidence(noise=1.0))
    assert {verdict.status for verdict in noisy.verdicts} == {"INCONCLUSIVE"}
    assert noisy.exit_code == 3
    # A cell without replicates leaves nothing to decide about times.
    unmeasured = evidence()
    unmeasured.log_ratios[BAKER.name] = []
    assert decided(unmeasured).verdicts == ()
    # A faster cell is not too noisy to show that it is not slower.
    assert time_of(decided(evidence({BAKER.name: -0.5}, noise=0.3))) == "PASS"


def test_the_mean_of_all_cells_is_tested() -> None:
    """Cells that are too noisy to fail alone fail together, and faster cells balance slower ones."""
    many = [cell(f"C{index}") for index in range(40)]
    for shares, status in ((dict.fromkeys(many, 0.009), "FAIL"), ({many[0]: 0.009}, "PASS")):
        gate = evidence({cell.name: share for cell, share in shares.items()}, rows=surveys(many), noise=0.04)
        decision = decided(gate)
        assert time_of(decision, MEAN) == status
        assert {time_of(decision, cell.name) for cell in many} == {"PASS"}
        assert decision.exit_code == (status == "FAIL")


def test_the_level_is_shared_by_cells_mean_and_looks() -> None:
    """Each lower bound is at the level of its test; a control is tested at the whole level."""
    gate = evidence()
    decision = decided(gate)
    first = {name: trimmed(looks[0], SETTINGS.trim) for name, looks in gate.log_ratios.items()}
    first[MEAN] = mean_over_cells([first[cell.name] for cell in CELLS])
    levels = {**dict.fromkeys(CONTROLS, 0.01 / 3), MEAN: 0.01 / 4}
    levels |= {cell.name: 0.01 / 4 / 3 for cell in CELLS}
    for verdict in (*decision.verdicts, *decision.controls):
        expected = bounds(first[verdict.cell], SETTINGS.looks[0], levels[verdict.cell], SETTINGS)
        assert verdict.bounds == expected, verdict.cell


def test_rows_and_outputs_are_compared_exactly() -> None:
    """A row missing in head fails, and so does a wrong output of head, whether or not base is right.

    Only cells that both arms compute correctly are timed.
    """
    missing, wrong = [("row", "FAIL", "missing: why")], [("output", "FAIL", "why")]
    added = [("row", "PASS", "added: base has no such row")]
    for base, head, expected in (
        ("ok", "ok", []),
        ("ok", "absent", [("row", "FAIL", "missing: the suite of head does not have it")]),
        ("ok", "unavailable", missing),
        ("ok", "failed", wrong),
        ("absent", "ok", added),
        ("unavailable", "ok", added),
        ("absent", "failed", wrong),
        ("failed", "ok", [("output", "PASS", "nothing to compare with: base has a bug")]),
        ("failed", "failed", wrong),
        ("failed", "unavailable", missing),
        ("absent", "unavailable", []),
        ("unavailable", "absent", []),
    ):
        rows = [
            surveyed(ABLE, arm, status, reason)  # type: ignore[arg-type]  # an arm
            for arm, status, reason in (("base", base, "a bug"), ("head", head, "why"))
            if status != "absent"
        ]
        assert exact(*rows) == exact(*rows[::-1]) == expected, (base, head)
        assert timed_cells(rows) == [ABLE] * (base == head == "ok")


def test_counts_are_compared_exactly() -> None:
    """One byte, launch or compiled graph more fails, fewer pass, and a count missing in head fails."""
    for metric in ("peak_bytes", "noise_bytes", "launches", "graphs"):
        for before, after, expected in (
            (5, 5, []),
            (10**6, 10**6 + 1, ["FAIL"]),
            (0, 1, ["FAIL"]),
            (6, 5, ["PASS"]),
            (5, None, ["FAIL"]),
            (None, 5, []),
        ):
            rows = [
                Surveyed(cell=ABLE, arm=arm, status="ok", figures={} if value is None else {metric: value})
                for arm, value in zip(ARMS, (before, after), strict=True)
            ]
            assert exact(*rows) == [(metric, status, "") for status in expected], (metric, before, after)


def test_controls_that_misbehave_make_a_gate_invalid() -> None:
    """Equal work that differs, extra work that is not found, or an unmeasured control is a reason."""
    for same, more, reason in (
        (0.01, 0.02, "equal work differs between the arms (+1.00 %, at least"),
        (-0.01, 0.02, "equal work differs between the arms (-1.00 %, at least"),
        (0.0, 0.0, "2 % more work was not found"),
        (0.0, 0.004, "2 % more work was not found"),
        (0.0, -0.02, "2 % more work was not found"),
    ):
        shares = {f"{SAME} | host": same, f"{MORE} | host": more}
        decision = decided(evidence(SLOWER, controls=shares))
        assert decision.exit_code == 3
        assert any(reason in error for error in decision.invalid), reason


EXACT = st.sampled_from(["row", "output", "peak_bytes", "noise_bytes", "launches", "graphs"])
VERDICTS = st.lists(
    st.builds(
        Verdict,
        cell=st.just("A"),
        metric=st.one_of(st.just("latency_ns"), EXACT),
        status=st.sampled_from(["PASS", "FAIL", "INCONCLUSIVE"]),
        accepted=st.sampled_from(["", "why"]),
    )
)


REASONS = st.lists(st.just("why"))


@given(VERDICTS, REASONS, REASONS, EXACT)
def test_nothing_bad_passes(
    verdicts: list[Verdict], invalid: list[str], unused: list[str], metric: Metric
) -> None:
    """Exit code 0 needs a valid gate in which every verdict passes or is waived; an exact failure makes it 1.

    A slower cell makes it 1 in a valid gate, also beside a noisy cell. An unused waiver turns only 0 into 2.
    """
    code = exit_code(verdicts, invalid, unused)
    if code in {0, 2}:
        assert code == (2 if unused else 0)
        code = 0
    bad = [verdict for verdict in verdicts if verdict.status != "PASS" and not verdict.accepted]
    bad += [verdict for verdict in verdicts if verdict.status == "INCONCLUSIVE" and verdict.accepted]
    assert (code == 0) == (not bad and not invalid)
    failed = [verdict for verdict in bad if verdict.status == "FAIL"]
    is_exact = any(verdict.metric != "latency_ns" for verdict in failed)
    assert (code == 1) == (is_exact or bool(failed and not invalid))
    assert code in {0, 1, 3}
    worse = Verdict(cell="B", metric=metric, status="FAIL")
    assert exit_code([*verdicts, worse], invalid, unused) == 1
