"""What many cells say of the spread of one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from esbench.gate.moderation import prior

FREEDOM = 2


def drawn(variance: float, freedom: float, cells: int) -> list[float]:
    """Variances of cells as the model has them scatter, each seen with two degrees of freedom."""
    rng = np.random.default_rng(0)
    true = variance if math.isinf(freedom) else variance * freedom / rng.chisquare(freedom, cells)
    return [float(one) for one in true * rng.chisquare(FREEDOM, cells) / FREEDOM]


@pytest.mark.parametrize("variance", [1e-6, 4.0])
@pytest.mark.parametrize("freedom", [2.0, 4.0, 10.0])
def test_the_scatter_of_variances_tells_the_prior_they_came_from(variance: float, freedom: float) -> None:
    """Within a tenth or so of many thousands of cells."""
    found = prior(drawn(variance, freedom, 20_000), FREEDOM)
    assert found is not None
    assert found.variance == pytest.approx(variance, rel=0.1)
    assert found.freedom == pytest.approx(freedom, rel=0.25)
    assert found.pooled == 40_000


def test_cells_that_scatter_by_chance_alone_are_pooled() -> None:
    """Then a cell's own replicates say nothing that all cells do not say better."""
    found = prior([1.0, 1.1, 0.9, 1.0], FREEDOM)
    assert found is not None
    assert (found.freedom, found.pooled) == (math.inf, 8.0)
    assert found.variance == pytest.approx(math.exp(np.euler_gamma) * 0.99**0.25)
    assert found.moderate(100.0, FREEDOM) == (found.variance, 8.0)


def test_fewer_than_three_cells_say_nothing_and_neither_do_those_without_a_spread() -> None:
    """Replicates that agree to the last digit come from no clock."""
    assert prior([1.0, 2.0], FREEDOM) is None
    assert prior([0.0] * 50 + [1.0, 2.0], FREEDOM) is None
    assert prior([0.0] * 50 + [1.0, 2.0, 3.0], FREEDOM) is not None


@given(st.lists(st.floats(1e-30, 1e30), min_size=3, max_size=30), st.integers(1, 20))
def test_a_moderated_variance_lies_between_that_of_the_cell_and_that_of_all(
    variances: list[float], freedom: int
) -> None:
    """However they scatter; its degrees of freedom are more than the cell's, and no more than all cells'."""
    found = prior(variances, freedom)
    assert found is not None
    for one in variances:
        moderated, known = found.moderate(one, freedom)
        low, high = sorted((one, found.variance))
        assert low * (1 - 1e-9) <= moderated <= high * (1 + 1e-9)
        assert freedom <= known <= freedom * len(variances)


def test_moderated_t_statistics_are_t_distributed() -> None:
    """Where the model holds, with the degrees of freedom that it says: so no cell is kept more often."""
    rng = np.random.default_rng(3)
    cells = 20_000
    true = 4.0 / rng.chisquare(4.0, cells)
    samples = rng.normal(0, np.sqrt(true)[:, None], (cells, 3))
    found = prior(list(samples.var(axis=1, ddof=1)), FREEDOM)
    assert found is not None
    moderated = [found.moderate(float(one), FREEDOM) for one in samples.var(axis=1, ddof=1)]
    t = samples.mean(axis=1) / np.sqrt(np.array([one for one, _ in moderated]) / 3)
    assert stats.kstest(t, stats.t(moderated[0][1]).cdf).pvalue > 0.01
