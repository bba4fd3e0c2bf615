"""Selecting what the page shows: by mouse, by a link, and by keyboard."""

from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Open
from tests.report.web_cases import NEW, OLD

if TYPE_CHECKING:
    from playwright.sync_api import Page


def labels(page: "Page") -> list[str]:
    """Return the variants of the table, from the top."""
    return page.locator("#table tbody th").all_inner_texts()


def column(page: "Page", heading: str) -> list[str]:
    """Return the first line of each cell under a heading."""
    headings = page.locator("#table thead th").all_inner_texts()
    (place,) = [number for number, text in enumerate(headings) if text.startswith(heading)]
    cells = page.locator(f"#table tbody tr > :nth-child({place + 1})").all_inner_texts()
    return [cell.split("\n")[0] for cell in cells]


def test_it_begins_with_an_answer(opened: Open) -> None:
    """The first heading names the best variant at the selected shape, and its gain per time."""
    page = opened()
    assert page.inner_text("h1") == "Use HadamardLinear: 205 n_eff per ms"
    assert "takes 5.00 ms, 5.00x the plain layer's time" in page.inner_text("#answer-why")
    assert "FlippedLinear has the fastest step, 4.00 ms" in page.inner_text("#answer-why")
    assert f"Run {NEW}" in page.inner_text("#answer-origin")


def test_another_device_and_shape(opened: Open) -> None:
    """A selected device and shape change table, pictures and answer; other choices are kept if possible."""
    page = opened()
    assert page.locator("#choose-device option").all_inner_texts() == ["Test CPU", "GPU 1"]
    page.select_option("#choose-phase", "forward")
    page.select_option("#choose-metric", "latency_ns/host")
    page.select_option("#choose-device", "GPU 1")
    page.select_option("#choose-shape", "(512, 512)")
    assert page.input_value("#choose-phase") == "forward"
    assert page.inner_text("#answer-where") == "Linear (512, 512), float32, 1024 members, on GPU 1"
    assert column(page, "Time (ms)")[:2] == ["40.2", "60.4"]
    assert "Linear(512, 512)" in page.inner_text("#bars figcaption")
    assert page.inner_text("h1") == "Fastest forward: LowRankLinear(rank=1)"
    assert "run 2025" in page.inner_text("#table caption")


def test_a_metric_and_a_population(opened: Open) -> None:
    """Selecting a population or a metric changes the figures and their unit."""
    page = opened()
    page.select_option("#choose-members", "64")
    page.select_option("#choose-metric", "peak_bytes/allocator")
    assert column(page, "Peak memory")[0] == "1.00"
    assert "MB" in page.inner_text("#bars figcaption")


def test_a_cell_without_a_number_says_why(opened: Open) -> None:
    """A variant that ran out of memory has a row with its reason."""
    page = opened(link="#shape=(512, 512)&phase=forward&metric=latency_ns/host")
    row = page.locator("#table tbody tr", has_text="Hadamard")
    assert "unavailable: out of memory: 9 GB" in row.inner_text()
    assert labels(page)[-1] == "HadamardLinear"


def test_sorting(opened: Open) -> None:
    """A heading sorts with the best first, the second time in reverse, and is marked as sorted."""
    page = opened(link="#phase=forward&metric=latency_ns/host&shape=(512, 512)")
    assert labels(page)[:3] == ["Base", "LowRankLinear(rank=1)", "PerturbedLinear"]
    page.click("#table thead button >> text=vs. naive")
    assert page.locator("#table thead th[aria-sort]").get_attribute("aria-sort") == "descending"
    assert labels(page)[0] == "Base"
    page.click("#table thead button >> text=vs. naive")
    assert page.locator("#table thead th[aria-sort]").get_attribute("aria-sort") == "ascending"
    assert labels(page)[0] == "Naive"
    page.click("#table thead button >> text=Variant")
    assert labels(page) == sorted(labels(page), key=str.lower)
    bars = page.locator("#bars g.chosen text:first-of-type").all_text_contents()
    assert bars == [name for name in labels(page) if name != "HadamardLinear"]  # it has no number


def test_filtering(opened: Open) -> None:
    """Words keep the variants that contain all of them, in table and pictures; so does the check box."""
    page = opened()
    before = len(labels(page))
    page.fill("#filter", "flipped 8")
    assert labels(page) == ["FlippedLinear(cores=8)"]
    assert page.inner_text("#count") == f"1 of {before} variants"
    assert page.locator("#bars g.chosen").count() == 1
    page.fill("#filter", "nothing at all")
    assert labels(page) == []
    assert not page.is_visible("#bars")
    page.fill("#filter", "")
    page.select_option("#choose-metric", "latency_ns/host")
    page.select_option("#choose-phase", "forward")
    assert "Base" in labels(page)
    page.uncheck("#baselines")
    assert "Base" not in labels(page)


def test_a_link_brings_back_what_is_shown(opened: Open) -> None:
    """The address has choice, order, filter and open variant, so another reader gets the same view."""
    page = opened()
    page.select_option("#choose-phase", "forward")
    page.select_option("#choose-shape", "(512, 512)")
    page.fill("#filter", "linear")
    page.click("#table thead button >> text=Variant")
    page.click("#table >> text=LowRankLinear(rank=1)")
    link = page.url.partition("#")[2]
    other = opened(link=f"#{link}")
    assert other.input_value("#choose-shape") == "(512, 512)"
    assert other.input_value("#choose-phase") == "forward"
    assert other.input_value("#filter") == "linear"
    assert labels(other) == labels(page)
    assert other.inner_text("#detail-title") == "LowRankLinear(rank=1)"
    assert other.inner_text("#status") == ""


def test_back_goes_back(opened: Open) -> None:
    """The browser's back button undoes a choice."""
    page = opened()
    before = page.input_value("#choose-shape")
    page.select_option("#choose-shape", "(512, 512)")
    page.go_back()
    assert page.input_value("#choose-shape") == before


@pytest.mark.parametrize(
    "link", ["#device=Nowhere", "#phase=%00", "#members=-1&run=x", "#variant=Unheard%20of", "#metric=<b>"]
)
def test_a_link_to_what_is_not_there_is_said(opened: Open, link: str) -> None:
    """A link to data that the page lacks shows the nearest view and a message."""
    page = opened(link=link)
    assert page.inner_text("#status").startswith("Not in this page: ")
    assert page.inner_text("h1").startswith("Use ")


@pytest.mark.parametrize("link", ["#", "#&&=&", "#%", "#nothing", f"#a={'x' * 5000}"])
def test_a_broken_link_is_no_error(opened: Open, link: str) -> None:
    """With a damaged address the page shows its initial view."""
    assert opened(link=link).inner_text("h1").startswith("Use ")


def test_two_runs_side_by_side(opened: Open) -> None:
    """Two selected runs show the rows of both, the largest differences first, and how the runs differ."""
    page = opened()
    page.select_option("#compare-a", OLD)
    page.select_option("#compare-b", NEW)
    page.select_option("#compare-quantity", "forward/latency_ns/host")
    rows = [row.split("\t") for row in page.locator("#compare tbody tr").all_inner_texts()]
    (wide,) = [row for row in rows if row[:2] == ["Base", "Linear(512, 512)"]]
    assert wide[2:5] == ["20.12", "26.16", "1.300x"]
    ratios = [float(row[4].rstrip("x")) for row in rows]
    assert ratios == sorted(ratios, reverse=True)
    assert f"{len(rows)} rows are in both" in page.inner_text("#compare-status")
    page.click("#compare-swap")
    swapped = page.locator("#compare tbody tr", has_text="Base").filter(has_text="(512, 512)")
    assert swapped.inner_text().split("\t")[4] == "0.769x"


def test_runs_of_two_devices_are_told_apart(opened: Open) -> None:
    """A comparison across devices shows a warning; a run that the page lacks is reported."""
    page = opened(link=f"#a={NEW}&b=2025")
    assert "Different devices (device_name: Test CPU in A, GPU 1 in B" in page.inner_text("#compare-status")
    other = opened(link=f"#a={NEW}&b=never")
    assert other.inner_text("#compare-status").startswith("Run never is not in this page.")
