"""The picture of kappa, as fitted against its closed form."""

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection

from esbench.records import Row
from esbench.report.grid import Grid, quality_grids
from esbench.report.kappas import fits, kappas
from esbench.report.qualities import KAPPA, LINEAR
from esbench.report.sheets import Sheet
from tests import ranking_cases
from tests.picture_cases import along, drawn, key
from tests.ranking_cases import FLIPPED, HADAMARD, SPARSE, SQUARE, figure, qualities, rows, without_forms
from tests.synthetic import DENSE


def grid(found: list[Row]) -> Grid:
    """The kappas of a run."""
    (one,) = quality_grids(ranking_cases.run(found), "Linear", KAPPA, LINEAR)
    return one


def marks(sheet: Sheet) -> set[tuple[float, float]]:
    """Where marks stand."""
    return {(along(line)[0], along(line, "y")[0]) for line in sheet.axes[0].lines if len(along(line)) == 1}


def test_fits_stand_over_their_closed_forms() -> None:
    """A mark for each variant and case, with the interval of its fit; on the line the two are equal."""
    sheet = drawn(kappas(grid(rows())))
    assert marks(sheet) == {(0.0, 0.0), (65 / 8, 65 / 8), (65.0, 65.0)}
    axes = sheet.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("symlog", "symlog")
    assert axes.get_xlim() == axes.get_ylim()
    ends = sorted(
        (float(x), float(low), float(high))
        for one in axes.collections
        if isinstance(one, LineCollection)
        for (x, low), (_, high) in one.get_segments()
    )
    (found,) = [one for one in fits(grid(rows())) if one.variant == FLIPPED]
    assert ends[-1] == pytest.approx((65, 65 - found.fitted.reach, 65 + found.fitted.reach))
    assert found.fitted.reach > 0
    assert sheet.notes[0].endswith("Of 5 fits 5 lie there, 0 have intervals that say neither")


def test_the_band_is_what_a_fit_may_be_off() -> None:
    """5 % or 0.02 on either side, however far the axis goes."""
    form = figure(SPARSE, SQUARE, KAPPA, "closed form", 3000.0)
    fitted = figure(SPARSE, SQUARE, KAPPA, LINEAR, 3000.0, 3000.0)
    (axes,) = drawn(kappas(grid([*rows(), form, fitted]))).axes[:1]
    (band,) = (one for one in axes.collections if isinstance(one, PolyCollection))
    corners = np.asarray(band.get_paths()[0].vertices, dtype=float).tolist()
    for x in (0.0, 0.3, 3.0, 50.0):
        ys = [y for at, y in corners if abs(at - x) <= 0.2 * x + 1e-3]
        assert ys
        assert all(abs(y - x) <= 0.35 * x + 0.021 for y in ys)


def test_a_fit_that_contradicts_its_form_has_a_ring() -> None:
    """It is marked, and named in the key and below."""
    other = [row for row in rows() if row.variant != HADAMARD]
    wrong = [
        figure(HADAMARD, SQUARE, "kappa", "linear fitness", 5.0, 5.1, 5.0, 5.1),
        figure(HADAMARD, SQUARE, "kappa", "closed form", 0.0),
    ]
    sheet = drawn(kappas(grid([*other, *wrong])))
    (ring,) = [line for line in sheet.axes[0].lines if line.get_fillstyle() == "none"]
    assert (along(ring)[0], along(ring, "y")[0]) == pytest.approx((0.0, 5.05))
    assert "Contradicted: Hadamard" in sheet.notes
    assert key(sheet)[-1] == "contradicts its form"
    assert "contradicts its form" not in key(drawn(kappas(grid(rows()))))


def test_who_has_no_place_is_named() -> None:
    """A variant without a closed form, or that could not run, is named with the reason."""
    kept = [row for row in rows() if row.variant != DENSE]
    sheet = drawn(kappas(grid([*kept, *without_forms(qualities(DENSE, SQUARE, 0.0, 0.01))])))
    assert sheet.notes[1:] == [
        "Not shown, out of memory: SparsePerturbed(k=1)",
        "Not shown, no closed form: Perturbed",
    ] or sheet.notes[1:] == [
        "Not shown, no closed form: Perturbed",
        "Not shown, out of memory: SparsePerturbed(k=1)",
    ]


def test_without_closed_forms_there_is_no_picture() -> None:
    """Fits alone are in the table."""
    assert kappas(grid(without_forms(rows()))) is None
