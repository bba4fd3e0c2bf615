"""The pictures of the page: their marks and their axes."""

import pytest

from esbench.schema import Run
from tests import synthetic
from tests.browser.conftest import Open, script_section
from tests.report.ranking_cases import rows
from tests.synthetic import BASE, DENSE, linear, time_row, variant

SCALES = script_section("Axes")


def times(*found: tuple[str, list[float]]) -> Run:
    """Return a run of a forward: for each scheme its times in ms, one per round."""
    case = linear(64)
    schemes = {"Base": BASE, "Perturbed": DENSE}
    return synthetic.run([time_row(schemes.get(name, variant(name)), case, *ms) for name, ms in found])


WIDE = (("Base", [1.0]), ("Perturbed", [90.0 + one for one in range(7)]), ("Flipped", [0.0001]))
NEAR = (("Base", [1.0]), ("Perturbed", [9 + one / 10 for one in range(7)]))


def test_a_logarithmic_axis_has_dots(opened: Open) -> None:
    """Bar lengths would be meaningless there; a figure without an interval has no whisker."""
    page = opened([times(*WIDE)])
    assert "Logarithmic axis." in page.inner_text("#bars .note")
    assert page.locator("#bars circle.bar").count() == 3
    assert page.locator("#bars rect.bar").count() == 0
    whiskers = {
        group.locator("text").first.text_content(): group.locator(".whisker").count()
        for group in page.locator("#bars g.chosen").all()
    }
    assert whiskers == {"Base": 0, "PerturbedLinear": 3, "FlippedLinear": 0}
    assert " as dots for 3 variants" in (page.locator("#bars svg").get_attribute("aria-label") or "")


def test_an_axis_from_nothing_has_bars(opened: Open) -> None:
    """On an axis from 0 a bar is as long as its figure."""
    page = opened([times(*NEAR)])
    widths = [float(bar.get_attribute("width") or 0) for bar in page.locator("#bars rect.bar").all()]
    assert widths[1] == pytest.approx(9.3 * widths[0], rel=0.01)
    assert page.locator("#bars circle.bar").count() == 0


def test_axes_of_the_front_have_two_numbers_or_more(opened: Open) -> None:
    """Both axes have two numbers, however close the variants are."""
    steps = {DENSE: 4.1, variant("Flipped"): 4.0}
    near = rows(kappas=dict.fromkeys(steps, 0.0), steps=steps | {BASE: 1.0})
    page = opened([synthetic.run(near)])
    sides = page.locator("#pareto text.soft").evaluate_all(
        "every => every.map((one) => one.getAttribute('text-anchor'))"
    )
    assert sides.count("middle") - 1 >= 2  # one is the title of the axis
    assert sides.count("end") >= 2


def test_ticks_are_round_and_two_or_more(opened: Open) -> None:
    """Ticks are in range, increasing, and at most ten unless there are powers of ten between them."""
    script = f"(ranges) => {{ {SCALES} return ranges.map((range) => decades(...range)); }}"
    ranges = [
        (low, low * ratio)
        for low in (1e-6, 0.0011, 0.93, 2.1, 6.2, 730.0, 5e8)
        for ratio in (1.38, 2, 4, 9, 1e3, 1e9)
    ]
    for (low, high), ticks in zip(ranges, opened().evaluate(script, ranges), strict=True):
        assert 2 <= len(ticks) <= 11
        assert ticks == sorted(set(ticks))
        assert all(low <= tick <= high for tick in ticks)
