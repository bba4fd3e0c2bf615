"""The bounds of an effect, held to what others work out."""

import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esbench.gate.decision import bounds


@given(
    estimates=st.lists(st.floats(-0.05, 0.05), min_size=2, max_size=12),
    alpha=st.floats(0.005, 0.2),
    null=st.floats(0, 0.02),
)
def test_bounds_are_those_of_student_s_t(estimates: list[float], alpha: float, null: float) -> None:
    """As statistics and scipy have them, however they are worked out."""
    found = bounds(estimates, null=null, alpha=alpha, power=0.8)
    mean, error = fmean(estimates), stdev(estimates) / math.sqrt(len(estimates))
    t = stats.t(len(estimates) - 1)
    assert math.log1p(found.low) == pytest.approx(mean - t.ppf(1 - alpha) * error, abs=1e-12)
    assert math.log1p(found.high) == pytest.approx(mean + t.ppf(1 - alpha) * error, abs=1e-12)
    reach = math.log1p(null) + (t.ppf(1 - alpha) + t.ppf(0.8)) * error
    assert math.log1p(found.mde) == pytest.approx(reach, abs=1e-12)
    if error > 1e-9:
        assert found.p == pytest.approx(t.sf((mean - math.log1p(null)) / error), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("value", "p"), [(0.1, 0.0), (0.0, 1.0), (-0.1, 1.0)])
def test_replicates_that_agree_to_the_last_bit_leave_no_doubt(value: float, p: float) -> None:
    """A spread of nothing is nothing, and not what rounding makes of it."""
    found = bounds([value] * 3, null=0.005, alpha=0.01, power=0.8)
    assert found.p == p
    assert found.low == found.high == found.effect
