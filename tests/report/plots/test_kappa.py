"""The plot of fitted kappa against its closed form."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection

from esbench.report.analysis.pivot import Grid, quality_grids
from esbench.report.analysis.quality import KAPPA, LINEAR
from esbench.report.plots.kappa import fits, kappa
from esbench.schema import Row
from tests.report import ranking_cases
from tests.report.plots.figures import along, drawn, legend, points
from tests.report.ranking_cases import HADAMARD, SPARSE, SQUARE, qualities, quality_row, rows, without_forms
from tests.synthetic import DENSE


def grid(measured_rows: list[Row]) -> Grid:
    """Return the kappas of a run."""
    (kappas,) = quality_grids(ranking_cases.run(measured_rows), "Linear", KAPPA, LINEAR)
    return kappas


def test_fits_are_drawn_over_their_closed_forms() -> None:
    """Each variant and case has a marker with the interval of its fit; the two axes are alike."""
    figure = drawn(kappa(grid(rows())))
    (axes,) = figure.axes
    assert set(points(axes)) == {(0.0, 0.0), (65 / 8, 65 / 8), (65.0, 65.0)}
    assert (axes.get_xscale(), axes.get_yscale()) == ("symlog", "symlog")
    assert axes.get_xlim() == axes.get_ylim()
    lines = (bars for bars in axes.collections if isinstance(bars, LineCollection))
    last = max(ends.tolist() for line in lines for ends in line.get_segments())
    (fit,) = [kappa_fit for kappa_fit in fits(grid(rows())) if kappa_fit.variant == ranking_cases.FLIPPED]
    (x, low), (_, high) = last
    assert (x, low, high) == pytest.approx((65, 65 - fit.fitted.reach, 65 + fit.fitted.reach))
    assert fit.fitted.reach > 0
    assert figure.notes[0].endswith("Of 5 fits 5 lie in it, 0 are undecided by their intervals")


def test_the_band_shows_the_tolerance() -> None:
    """The band is 5 % or 0.02 on either side, over the whole axis."""
    form = quality_row(SPARSE, SQUARE, KAPPA, "closed form", 3000.0)
    fitted = quality_row(SPARSE, SQUARE, KAPPA, LINEAR, 3000.0, 3000.0)
    (axes,) = drawn(kappa(grid([*rows(), form, fitted]))).axes
    (band,) = (area for area in axes.collections if isinstance(area, PolyCollection))
    corners = np.asarray(band.get_paths()[0].vertices, dtype=float).tolist()
    for x in (0.0, 0.3, 3.0, 50.0):
        ys = [y for at, y in corners if abs(at - x) <= 0.2 * x + 1e-3]
        assert max(ys) >= x + max(0.045 * x, 0.0199)
        assert all(abs(y - x) <= 0.35 * x + 0.021 for y in ys)


def test_a_fit_that_contradicts_its_form_has_a_ring() -> None:
    """A note names the fit, and the legend explains the ring."""
    others = [row for row in rows() if row.variant != HADAMARD]
    wrong = [
        quality_row(HADAMARD, SQUARE, "kappa", "linear fitness", 5.0, 5.1, 5.0, 5.1),
        quality_row(HADAMARD, SQUARE, "kappa", "closed form", 0.0),
    ]
    plot = drawn(kappa(grid([*others, *wrong])))
    (ring,) = [line for line in plot.axes[0].lines if line.get_fillstyle() == "none"]
    assert [*along(ring), *along(ring, "y")] == pytest.approx([0.0, 5.05])
    assert "Contradicted: Hadamard" in plot.notes
    assert legend(plot)[-1] == "contradicts its form"
    assert "contradicts its form" not in legend(drawn(kappa(grid(rows()))))


def test_variants_that_are_not_drawn_are_named() -> None:
    """A variant that is not drawn has a reason; without any closed form there is no plot."""
    kept = [row for row in rows() if row.variant != DENSE]
    figure = drawn(kappa(grid([*kept, *without_forms(qualities(DENSE, SQUARE, 0.0, 0.01))])))
    assert sorted(figure.notes[1:]) == [
        "Not shown, no closed form: Perturbed",
        "Not shown, out of memory: SparsePerturbed(k=1)",
    ]
    assert kappa(grid(without_forms(rows()))) is None
