"""The table with dots, its details, the comparison of two runs, the keyboard, and accessibility."""

import itertools
from typing import TYPE_CHECKING, Literal

import pytest

from tests import synthetic
from tests.browser.conftest import LAPTOP, PHONE, Open, Violations
from tests.report.ranking_cases import LOW_RANK, SQUARE, quality_row
from tests.report.web_cases import NEW, OLD
from tests.synthetic import BASE, DENSE, linear, time_row, variant

if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDE = "#layer=Linear 512 -> 512"
COMPARED = f"#a={OLD}&b={NEW}&quantity=forward: time (ms), host"
DETAIL = "#open=LowRank(rank%3D1)"


def names(page: "Page") -> list[str]:
    """Return the variants of the table, from the top."""
    return page.locator("#dots tbody th button").all_inner_texts()


def focused(page: "Page", property_: str = "id") -> str:
    """Return a property of the focused element."""
    value: str = page.evaluate(f"document.activeElement.{property_}")
    return value


def press_tab_until(page: "Page", condition: str) -> None:
    """Press Tab until a JavaScript condition on the focused element is true."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate(condition):
            return
    pytest.fail(f"80 tabs did not reach: {condition}")


def test_a_heading_sorts_the_rows(opened: Open) -> None:
    """A click sorts the best first, a second click in reverse; rows without a number come last."""
    page = opened(link=WIDE)
    assert names(page) == ["Base", "LowRank(rank=1)", "Perturbed", "Naive", "Hadamard"]
    page.click("#dots thead button >> text=faster than naive")
    assert page.locator("#dots [aria-sort]").get_attribute("aria-sort") == "descending"
    assert names(page) == ["Base", "LowRank(rank=1)", "Perturbed", "Naive", "Hadamard"]
    page.click("#dots thead button >> text=faster than naive")
    assert page.locator("#dots [aria-sort]").get_attribute("aria-sort") == "ascending"
    assert names(page) == ["Naive", "Perturbed", "LowRank(rank=1)", "Base", "Hadamard"]


def test_words_filter_the_variants(opened: Open) -> None:
    """Words keep the variants with all of them; an empty table says so and offers to clear the filter."""
    page = opened()
    few = names(page)
    assert "Flipped(cores=8)" in few
    assert "Flipped" not in few
    page.check("#all")
    assert len(names(page)) > len(few)
    page.fill("#filter", "flipped 8")
    assert names(page) == ["Flipped(cores=8)", "Perturbed"]
    page.evaluate("location.hash = location.hash + '&open=Flipped'")
    page.locator("#dots .detail").wait_for()
    assert "Flipped" in names(page)
    page.fill("#filter", "nothing at all")
    assert "nothing at all" in page.inner_text("#empty")
    assert not page.is_visible("#dots")
    page.click("#clear")
    assert focused(page) == "filter"
    assert len(names(page)) > len(few)


def test_marks_are_at_the_positions_of_their_values(opened: Open) -> None:
    """On the logarithmic axis equal ratios are equal distances, and a whisker spans the interval."""
    times = {BASE: [1.0], DENSE: [8.0 + tenth / 10 for tenth in range(7)], variant("Flipped"): [4.0]}
    page = opened([synthetic.run([time_row(timed, linear(), *ms) for timed, ms in times.items()])])
    percents = {
        name: float((mark.get_attribute("x") or "").rstrip("%"))
        for name, mark in zip(names(page), page.locator("#dots svg.mark:has(path.value)").all(), strict=True)
    }
    # The times are 1, 4 and 8.3 ms: 2 of log2(8.3) = 3.05 powers of two.
    length = percents["Perturbed"] - percents["Base"]
    assert percents["Flipped"] - percents["Base"] == pytest.approx(2 / 3.05 * length, rel=0.01)
    assert page.locator("#dots .whisker").count() == 1
    assert page.locator("#dots svg.dots").first.get_attribute("aria-label") == "Base: time (ms) 1.00"


def test_negative_and_huge_numbers_are_drawn(opened: Open) -> None:
    """A metric below 0 has a linear axis, 1e24 and 0 have their places; no coordinate is NaN."""
    kappas = [
        quality_row(row, SQUARE, "kappa", "linear fitness", at, at)
        for row, at in ((DENSE, -0.5), (LOW_RANK, 0.5))
    ]
    page = opened([synthetic.run(kappas)], name="kappa")
    assert "linear axis" in str(page.locator("svg.axis").get_attribute("aria-label"))
    assert page.locator("#dots path.value").count() == 2
    odd = [time_row(row, linear(), ms) for row, ms in ((BASE, 1.0), (DENSE, 0.0), (variant("Huge"), 1e18))]
    page = opened([synthetic.run(odd)], name="odd")
    assert not {"NaN", "Infinity"} & set(page.inner_html("#dots").replace('"', " ").split())
    assert page.locator("#dots path.value").count() == 3


def test_details_open_below_their_row(opened: Open) -> None:
    """A click on a name opens formula, source, closed forms, code and all values of the variant."""
    page = opened(link=WIDE)
    page.click("#dots >> text=LowRank(rank=1)")
    detail = page.inner_text("#dots .detail")
    for text in ("E_m = up_m @ down_m / sqrt(rank).", "arXiv:2511.16652", "n * rank * (o + i) numbers."):
        assert text in detail
    table = page.locator("#dots .detail table").first
    heads, cells = (table.locator(where).all_inner_texts() for where in ("thead th", "tbody tr > *"))
    row = dict(zip(heads, cells, strict=True))
    assert (row["Phase"], row["time (ms)"], row["±"], row["x plain"]) == ("forward", "39.2", "± 0.2", "1.50x")
    page.click("#dots >> text=LowRank(rank=1)")
    assert page.locator("#dots .detail").count() == 0
    page.click("#dots >> text=Hadamard")
    assert "unavailable: out of memory: 9 GB" in page.inner_text("#dots .detail")


def test_two_runs_compared(opened: Open) -> None:
    """Both runs' rows are shown worst first, colored beyond the intervals, with the median shift."""
    page = opened()
    page.select_option("#compare-a", OLD)
    page.select_option("#compare-b", NEW)
    page.select_option("#compare-quantity", "forward: time (ms), host")
    rows = [row.split("\t") for row in page.locator("#compare-table tbody tr").all_inner_texts()]
    (wide,) = [row for row in rows if row[:2] == ["Base", "Linear(512, 512)"]]
    assert wide[2:5] == ["20.12", "26.16", "1.30x worse"]
    ratios = [float(row[4].partition("x")[0]) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    assert "B / A is 1.30x in the median" in page.inner_text("#compare-status")
    assert page.locator("#compare-table tr.worse").count() > 0
    page.click("#compare-swap")
    assert "B / A is 0.769x in the median" in page.inner_text("#compare-status")
    assert page.locator("#compare-table tr.better").count() > 0
    reopened = opened(link=f"#{page.url.partition('#')[2]}")
    assert reopened.inner_text("#compare") == page.inner_text("#compare")


def test_runs_that_cannot_be_compared(opened: Open) -> None:
    """Different devices, an unknown run and an unknown quantity each have a message."""
    page = opened(link=f"#a={NEW}&b=2025&quantity=forward: nothing")
    assert "Different devices (device_name: Test CPU in A, GPU 1 in B" in page.inner_text("#compare-status")
    assert "Not in both runs: forward: nothing." in page.inner_text("#compare-status")
    reopened = opened(link=f"#a={NEW}&b=never")
    assert reopened.inner_text("#compare-status").startswith("Run never is not in this page.")


def test_the_page_works_with_the_keyboard_alone(opened: Open) -> None:
    """The keyboard is enough to skip, choose, sort, filter, open, read marks and compare."""
    page = opened()
    page.keyboard.press("Tab")
    assert focused(page) == "skip"
    page.keyboard.press("Enter")
    assert focused(page) == "main"
    press_tab_until(page, "document.activeElement.id === 'choose-layer'")
    page.keyboard.press("ArrowDown")
    assert focused(page) == "choose-layer"
    assert page.inner_text("h1").startswith("Fastest")
    page.keyboard.press("ArrowUp")
    press_tab_until(page, "document.activeElement.id === 'filter'")
    page.keyboard.type("hada")
    assert focused(page) == "filter"
    assert names(page) == ["Hadamard", "Perturbed"]
    press_tab_until(page, "document.activeElement.dataset.column === 'variant'")
    page.keyboard.press("Enter")
    assert focused(page, "dataset.column") == "variant"
    press_tab_until(page, "document.activeElement.dataset.variant !== undefined")
    page.keyboard.press("Enter")
    assert focused(page, "ariaExpanded") == "true"
    page.keyboard.press("Tab")
    assert focused(page, "ariaLabel").startswith("Hadamard: n_eff / ms 205")
    page.keyboard.press("Escape")
    assert (focused(page, "ariaExpanded"), focused(page, "dataset.variant")) == ("false", "Hadamard")
    press_tab_until(page, "document.activeElement.id === 'compare-a'")
    page.keyboard.press("ArrowDown")
    assert focused(page) == "compare-a"


def test_axe_finds_nothing(opened: Open, violations: Violations) -> None:
    """No view of the page has a violation, in both themes and at phone width, where nothing is cut off."""
    page = opened()
    address = page.url.partition("#")[0]
    themes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    views = (DETAIL, COMPARED, "#filter=zz")
    for scheme, viewport, link in itertools.product(themes, (LAPTOP, PHONE), views):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size(viewport)
        page.goto(f"{address}{link}")
        page.reload()
        problems = [(found["id"], found["nodes"][0]["html"][:200]) for found in violations(page)]
        assert problems == [], (scheme, viewport, link)
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"], (scheme, link)


def test_axe_finds_a_planted_problem(opened: Open, violations: Violations) -> None:
    """axe-core reports a control without an accessible name, so the check can fail."""
    page = opened()
    page.evaluate(
        "document.querySelector('#choice label').replaceWith(document.querySelector('#choose-layer'))"
    )
    assert "select-name" in {problem["id"] for problem in violations(page)}
