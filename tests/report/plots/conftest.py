"""Every plot at both widths, drawn once."""

from collections.abc import Mapping

import pytest

from esbench.report.plots.catalog import PLOTS, PlotRequest
from esbench.report.plots.style import WIDTHS, Figure
from tests.report.plots.figures import draw

Figures = Mapping[tuple[str, str], Figure]


@pytest.fixture(scope="session")
def figures() -> Figures:
    """Name and width -> figure."""
    return {
        (name, width): draw(name, request=PlotRequest(width=inches))
        for name in PLOTS
        for width, inches in WIDTHS.items()
    }
