"""The gate's controls: where they misbehave, or were not measured, its times decide nothing."""

import pytest

from esbench.gate.records import MORE, SAME, Settings
from tests.gate.gate_cases import (
    ABLE,
    BAKER,
    CELLS,
    CONTROLS,
    DOG,
    cell,
    evidence,
    judged,
    surveys,
)

SLOWER = {BAKER.name: 0.02}
LOOKS_SLOWER = {BAKER.name: 0.02, DOG.name: -0.03}
"""A screen after which one cell must be confirmed, and not their mean."""


@pytest.mark.parametrize(
    ("same", "more", "reason"),
    [
        (0.01, 0.02, "the same work differs between the arms (+1.00 %, at least"),
        (-0.01, 0.02, "the same work differs between the arms (-1.00 %, at least"),
        (0.0, 0.0, "the 2 % that were planted were not found"),
        (0.0, 0.004, "the 2 % that were planted were not found"),
        (0.0, -0.02, "the 2 % that were planted were not found"),
    ],
)
def test_controls_that_misbehave_make_a_gate_invalid(same: float, more: float, reason: str) -> None:
    """One arm faster than itself, or deaf to what was planted: no time of this gate decides anything."""
    judgement = judged(evidence(SLOWER, SLOWER, controls={f"{SAME} | host": same, f"{MORE} | host": more}))
    assert judgement.exit_code == 3
    assert [one for one in judgement.invalid if reason in one]


@pytest.mark.parametrize("lacking", [SAME, MORE])
def test_a_control_that_was_not_measured_makes_a_gate_invalid(lacking: str) -> None:
    """There is no gate without both."""
    controls = {name: share for name, share in CONTROLS.items() if not name.startswith(lacking)}
    judgement = judged(evidence(controls=controls))
    assert (judgement.exit_code, judgement.invalid) == (3, (f"{lacking} | host: it was not measured",))


def test_each_method_has_its_controls() -> None:
    """Those by the host say nothing of what was timed by a graph."""
    graphs = [cell("Able", method="graph"), ABLE]
    controls = {**CONTROLS, f"{SAME} | graph": 0.0, f"{MORE} | graph": 0.0}
    shares = {one.name: 0.0 for one in graphs}
    deaf = judged(evidence(shares, rows=surveys((*CELLS, graphs[0])), controls=controls))
    assert deaf.exit_code == 3
    lacking = judged(evidence(shares, rows=surveys((*CELLS, graphs[0]))))
    assert lacking.exit_code == 3
    assert f"{SAME} | graph: it was not measured" in lacking.invalid


@pytest.mark.parametrize("margin", [0.0, 0.019, 0.021, 0.04])
def test_another_margin_counts(margin: float) -> None:
    """What is slower by less passes; the two percent that are planted have to be found all the same."""
    judgement = judged(evidence(LOOKS_SLOWER, SLOWER), settings=Settings(margin=margin))
    assert judgement.invalid == ()
    (verdict,) = [one for one in judgement.verdicts if one.cell == BAKER.name]
    expected = ("FAIL", 1) if margin < 0.02 else ("PASS", 0)
    assert (verdict.status, judgement.exit_code) == expected
