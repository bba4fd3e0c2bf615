"""The comparison of two runs by keyboard, by a link, and on a phone."""

from typing import TYPE_CHECKING

from tests.browser.conftest import PHONE, Open
from tests.browser.test_access import tabbed
from tests.report.web_cases import NEW, OLD

if TYPE_CHECKING:
    from playwright.sync_api import Page


def rows(page: "Page") -> list[str]:
    """Return the rows of the comparison."""
    return page.locator("#compare tbody tr").all_inner_texts()


def focused(page: "Page") -> str:
    """Return the id of the focused element."""
    found: str = page.evaluate("document.activeElement.id")
    return found


def test_by_keys_alone(opened: Open) -> None:
    """The keyboard selects runs, quantity and sides, and the focus stays in place."""
    page = opened()
    tabbed(page, "document.activeElement.id === 'compare-a'")
    for side, run in (("compare-a", OLD), ("compare-b", NEW)):
        assert focused(page) == side
        for _ in range(page.locator(f"#{side} option").count()):
            if page.input_value(f"#{side}") == run:
                break
            page.keyboard.press("ArrowDown")
            assert focused(page) == side
        assert page.input_value(f"#{side}") == run
        page.keyboard.press("Tab")
    assert focused(page) == "compare-quantity"
    before = page.input_value("#compare-quantity")
    page.keyboard.press("ArrowDown")
    assert focused(page) == "compare-quantity"
    assert page.input_value("#compare-quantity") != before
    page.keyboard.press("Tab")
    assert focused(page) == "compare-swap"
    page.keyboard.press("Enter")
    assert focused(page) == "compare-swap"
    assert (page.input_value("#compare-a"), page.input_value("#compare-b")) == (NEW, OLD)
    page.keyboard.press("Tab")
    assert focused(page) == "compare-scroll"


def test_a_filter_keeps_the_focus_while_it_is_typed(opened: Open) -> None:
    """The table is drawn again for each letter, without losing the focus."""
    page = opened()
    tabbed(page, "document.activeElement.id === 'filter'")
    page.keyboard.type("flip 8")
    assert focused(page) == "filter"
    assert page.input_value("#filter") == "flip 8"
    assert page.locator("#table tbody th").all_inner_texts() == ["FlippedLinear(cores=8)"]
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert focused(page) == "baselines"
    assert not page.is_checked("#baselines")


def test_a_link_brings_a_comparison_back(opened: Open) -> None:
    """The address has both runs and the quantity, so another reader gets the same rows in order."""
    page = opened()
    page.select_option("#compare-a", OLD)
    page.select_option("#compare-b", NEW)
    page.select_option("#compare-quantity", "forward/peak_bytes/allocator")
    page.click("#compare-swap")
    shown = rows(page)
    assert shown
    other = opened(link=f"#{page.url.partition('#')[2]}")
    assert rows(other) == shown
    assert other.input_value("#compare-quantity") == "forward/peak_bytes/allocator"
    assert "B / A" in other.inner_text("#compare thead")
    assert other.inner_text("#compare-status") == page.inner_text("#compare-status")


def test_a_quantity_that_the_runs_lack_is_said(opened: Open) -> None:
    """A link to a quantity that the runs do not share shows another one, with a message."""
    page = opened(link=f"#a={OLD}&b={NEW}&quantity=forward/nothing/host")
    assert page.inner_text("#compare-status").startswith("Not in both runs: forward/nothing/host.")
    assert page.input_value("#compare-quantity") == "step/latency_ns/host"
    assert rows(page)
    page.select_option("#compare-quantity", "forward/latency_ns/host")
    assert "Not in both runs" not in page.inner_text("#compare-status")


def test_a_phone_shows_the_ratio(opened: Open) -> None:
    """On a phone the case is below its variant, and the page needs no sideways scrolling."""
    page = opened(link=f"#a={OLD}&b={NEW}&quantity=forward/latency_ns/host", viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    cell = page.locator("#compare tbody tr").first.locator("td").nth(3)
    assert cell.inner_text().endswith("x")
    box = cell.bounding_box()
    assert box
    assert box["x"] + box["width"] <= PHONE["width"]
    assert "Linear(" in page.locator("#compare tbody th").first.inner_text()
    wide = opened(link=f"#a={OLD}&b={NEW}")
    assert not wide.locator("#compare .narrow").first.is_visible()
