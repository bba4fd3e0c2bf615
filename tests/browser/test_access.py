"""The page by keyboard only, with a screen reader, on a phone, in light and dark themes."""

from pathlib import Path
from typing import Any

import pytest

from esbench.store import read_run
from tests.browser.conftest import LAPTOP, PHONE, Open, Violations
from tests.report.report_cases import ROOT
from tests.report.web_cases import NEW, OLD

COMPARED = f"#a={OLD}&b={NEW}"
DETAIL = "#variant=LowRank(rank%3D1)"
COMMITTED = "results/amd-epyc/20261122T151454Z-quick-c095.jsonl.gz"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("link", ["", COMPARED, DETAIL], ids=["start", "compared", "detail"])
def test_axe_finds_nothing(
    opened: Open, violations: Violations, scheme: str, viewport: dict[str, int], link: str
) -> None:
    """No view of the page has a violation, in both themes and at phone width."""
    page = opened(link=link, color_scheme=scheme, viewport=viewport)
    assert [(one["id"], one["impact"], one["nodes"][0]["html"][:200]) for one in violations(page)] == []


def test_axe_finds_what_is_planted(opened: Open, violations: Violations) -> None:
    """A control without a name is found, which shows that the check works."""
    page = opened()
    page.evaluate(
        "document.querySelector('#choice label').replaceWith(document.querySelector('#choose-device'))"
    )
    assert "select-name" in {one["id"] for one in violations(page)}


def test_keys_alone(opened: Open) -> None:
    """The keyboard is enough to skip to the answer, change the phase, sort, and open and close a variant."""
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    tabbed(page, "document.activeElement.id === 'choose-phase'")
    page.keyboard.press("ArrowUp")
    assert page.input_value("#choose-phase") != "step"
    assert page.evaluate("document.activeElement.id") == "choose-phase"
    tabbed(page, "document.activeElement.dataset.sort === 'label'")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.sort") == "label"
    assert page.locator("#table th[aria-sort]").inner_text().startswith("Variant")
    tabbed(page, "document.activeElement.dataset.variant !== undefined")
    name = page.evaluate("document.activeElement.innerText")
    page.keyboard.press("Enter")
    assert page.inner_text("#detail-title") == name
    page.keyboard.press("Tab")
    assert page.evaluate("document.getElementById('detail').contains(document.activeElement)")
    page.keyboard.press("Escape")
    page.locator(":focus", has_text=name).wait_for()


def tabbed(page: Any, there: str, most: int = 80) -> None:
    """Press Tab until the expected element has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate(there):
            return
    pytest.fail(f"{most} tabs did not reach: {there}")


@pytest.mark.parametrize("link", ["", COMPARED, DETAIL])
def test_a_phone_needs_no_sideways_scrolling(opened: Open, link: str) -> None:
    """At phone width nothing is outside the page; wide tables scroll in their own frame."""
    page = opened(link=link, viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    box = page.locator("#choose-metric").bounding_box()
    assert box
    assert box["height"] >= 40


@pytest.mark.parametrize(
    ("name", "options", "link"),
    [
        ("light", {"viewport": LAPTOP, "color_scheme": "light"}, ""),
        ("dark", {"viewport": LAPTOP, "color_scheme": "dark"}, ""),
        ("phone", {"viewport": PHONE, "color_scheme": "light"}, ""),
        ("detail", {"viewport": LAPTOP, "color_scheme": "light"}, DETAIL),
    ],
)
def test_pictures_of_it(
    opened: Open, screenshots: Path, name: str, options: dict[str, Any], link: str
) -> None:
    """Screenshots of a committed run, in each theme and at phone width, are not blank, and are kept."""
    run, _ = read_run(ROOT / COMMITTED)
    assert run
    page = opened([run], link, **options)
    file = screenshots / f"{name}.png"
    page.screenshot(path=file, full_page=not link)
    assert page.locator("#bars .bar").count() > 20
    assert page.locator("#pareto circle").count() > 20
    assert file.stat().st_size > 20_000
