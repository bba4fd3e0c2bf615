"""Steps with many forwards of one draw of noise: combined times, and the ranking by them."""

import msgspec
import pytest

from esbench.report.analysis.load import reasons_unreliable
from esbench.report.analysis.ranking import recommend
from esbench.report.analysis.rollout import with_forwards_per_step
from esbench.schema import Conditions, Measurement, Run, Skipped, Variant, Work
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import CORES, HADAMARD, SQUARE
from tests.synthetic import BASE, time_row


def steps(run: Run, forwards: int) -> list[Measurement]:
    """Return the steps of a run with this many forwards."""
    combined = with_forwards_per_step(run, forwards)
    return [row for row in combined.measurements if row.phase == "step"]


def test_each_other_forward_adds_the_mean_of_its_round() -> None:
    """Rounds that only one of the phases has are left out, with their positions and conditions."""
    step = time_row(HADAMARD, SQUARE, 10, 20, 30, phase="step", group=1)
    step = msgspec.structs.replace(step, positions=(1, 0, 2), conditions=((Conditions(),),) * 3)
    forward = time_row(HADAMARD, SQUARE, 2, 4, group=1)
    forward = msgspec.structs.replace(forward, samples=((1e6, 3e6, 5e6), (4e6,)))
    other_group = time_row(HADAMARD, SQUARE, 100, 100, 100)
    run = synthetic.run([step, forward, other_group])
    (combined,) = steps(run, 5)
    assert combined.samples == ((22e6,), (36e6,))  # 10 + 4 * 3 and 20 + 4 * 4 ms
    assert (combined.positions, len(combined.conditions)) == ((1, 0), 2)
    assert combined.labels == ("combined: a step and 4 forwards",)
    assert with_forwards_per_step(run, 1) is run


def test_a_step_without_forward_has_a_reason_and_base_without_step_no_forward() -> None:
    """Neither has a number that another could be compared with; memory and other phases stay."""
    forward = time_row(BASE, SQUARE, 1, 1)
    step = time_row(HADAMARD, SQUARE, 10, 10, phase="step")
    eager = time_row(HADAMARD, SQUARE, 1, 1, method="eager")
    peak = synthetic.bytes_row(HADAMARD, SQUARE, "peak_bytes", 7, phase="step")
    combined = with_forwards_per_step(synthetic.run([forward, step, eager, peak]), 2)
    reason, *others = combined.rows
    assert isinstance(reason, Skipped)
    assert (reason.variant, reason.phase, reason.method) == (HADAMARD, "step", "host")
    assert others == [eager, peak]


@pytest.mark.parametrize(("forwards", "best"), [(1, HADAMARD), (2, HADAMARD), (100, CORES)])
def test_with_many_forwards_the_fastest_forward_counts(forwards: int, best: Variant) -> None:
    """The ranking changes to the variant whose forward is fast although its step is slow."""
    times = {HADAMARD: 3.0, CORES: 0.5, BASE: 0.25}
    forward_rows = [time_row(variant, SQUARE, *[ms] * 6) for variant, ms in times.items()]
    run = ranking_cases.run([*ranking_cases.rows(), *forward_rows])
    recommendation = recommend([with_forwards_per_step(run, forwards)], SQUARE)
    assert recommendation
    assert recommendation.recommended[0].variant == best
    assert recommendation.recommended[0].step_ns == pytest.approx(
        1e6 * (ranking_cases.STEPS[best] + (forwards - 1) * times[best])
    )


def test_a_long_rollout_is_no_load() -> None:
    """The roofline bound of base grows with the forwards, so that their time is not taken for load."""
    measured = ranking_cases.run(ranking_cases.rows())
    base = [time_row(BASE, SQUARE, *[0.5] * 6, phase=phase) for phase in ("step", "forward")]
    rows = [row for row in measured.rows if row.variant != BASE]
    rows += [synthetic.working(row, 1e6, 1) for row in base]
    rows += [time_row(HADAMARD, SQUARE, *[1.0] * 6)]
    measured = msgspec.structs.replace(measured, rows=tuple(rows), device_peaks=synthetic.peaks())
    combined = with_forwards_per_step(measured, 1000)
    assert reasons_unreliable(combined) == {}
    (step,) = [row for row in combined.measurements if row.variant == BASE and row.phase == "step"]
    assert step.work == Work(flops=1e9, moved_bytes=1e3, output_bytes=1e6)
