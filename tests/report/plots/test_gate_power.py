"""The plot of the gate's power."""

from pathlib import Path

from esbench.gate.study import newest_of_each, read
from esbench.report.gate_findings import findings
from esbench.report.plots.gate_power import OURS, curves, gate_power
from esbench.report.rules import LEVELS
from tests.report.plots.conftest import Figures
from tests.report.plots.figures import drawn, legend


def test_a_curve_per_rule(figures: Figures, results: Path) -> None:
    """The gate's own first, with its false alarms in the legend; a panel per study."""
    figure = figures["gate-power", "page"]
    (axes,) = figure.axes
    lines = axes.get_lines()
    assert len(lines) == 9
    assert len({line.get_marker() for line in lines}) == 9
    assert legend(figure)[0] == f"{OURS} (0 %)"
    assert figure.notes == ["In brackets: the share of unchanged suites in which a rule flags anything"]
    found = findings(read(newest_of_each(results)[0]))
    assert curves(found)[0].name == OURS
    assert {tuple(curve.flagged) for curve in curves(found)} == {LEVELS}
    assert len(drawn(gate_power([found, found])).axes) == 2
