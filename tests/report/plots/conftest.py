"""Every plot at both widths, drawn once."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from esbench.report import gate_findings
from esbench.report.plots.catalog import PLOTS, PlotRequest
from esbench.report.plots.style import WIDTHS, Figure
from tests.gate_study_cases import replicates, stored
from tests.report.plots.figures import draw

Figures = Mapping[tuple[str, str], Figure]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of results with a study of the gate, from which few suites are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate_findings, "SUITES", 60)
        patch.setattr(gate_findings, "TRIALS", 20)
        patch.setattr(gate_findings, "LEAST_COMPARISONS", 120)
        folder = tmp_path_factory.mktemp("results")
        stored(folder, *replicates(13, between=0.0008, within=0.004))
        yield folder


@pytest.fixture(scope="session")
def figures(results: Path) -> Figures:
    """Name and width -> figure."""
    return {
        (name, width): draw(name, request=PlotRequest(width=inches, results=results))
        for name in PLOTS
        for width, inches in WIDTHS.items()
    }
