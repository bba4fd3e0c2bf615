"""The choice, the answer, the link that restores them, and pages with little or hostile data."""

from typing import TYPE_CHECKING

import pytest

from tests import synthetic
from tests.browser.conftest import PHONE, Open
from tests.report.ranking_cases import SQUARE, orthogonal, rows
from tests.report.web_cases import ALERT, LONG, NEW, committed_page, hostile_run, usual_run
from tests.synthetic import BASE, DENSE, linear, time_row, variant

if TYPE_CHECKING:
    from playwright.sync_api import Page

CODE = """from impls import LowRank, perturb
population = perturb(model, LowRank(rank=1), members=1024, sigma=0.02)"""


def answer_values(page: "Page") -> dict[str, str]:
    """Return the values of the answer's first variant, by the words below them."""
    pairs = page.locator("#answer-picks .pick").first.locator("dl > div").all()
    return {pair.locator("dt").inner_text(): pair.locator("dd").inner_text() for pair in pairs}


def test_the_page_begins_with_an_answer(opened: Open) -> None:
    """The first heading names the best variant; five values below it equal those of the table."""
    page = opened()
    assert page.inner_text("h1") == "Use Hadamard"
    assert list(answer_values(page).values()) == ["40.0x", "5.00x", "100 %", "5.00 ms", "1.00 MB"]
    cells = page.locator("#dots tbody tr", has_text="Hadamard").first.locator("td").all_inner_texts()[1:]
    assert cells == ["205", "205", "40.0x", "5.00x", "100", "5.00", "1.00"]
    assert "Flipped has the fastest step, 4.00 ms, but keeps only 59.4" in page.inner_text("#answer-notes")
    assert NEW in page.inner_text("#answer-origin")
    assert page.evaluate("document.querySelector('#dots tbody tr').getBoundingClientRect().top") < 800


def test_a_choice_changes_answer_and_table(opened: Open) -> None:
    """Device, layer, population, phase and metric change answer and table; an undo goes back."""
    page = opened()
    assert set(page.locator("#choose-device option").all_inner_texts()) == {"Test CPU", "GPU 1"}
    page.select_option("#choose-device", "GPU 1")
    page.select_option("#choose-layer", "Linear 512 -> 512")
    assert page.inner_text("h1") == "Fastest forward: LowRank(rank=1)"
    assert page.inner_text("#answer-where") == "Linear 512 -> 512, 1,024 members, on GPU 1"
    assert "n_eff was not measured here" in page.inner_text("#answer-notes")
    assert page.locator("#dots td.main").all_inner_texts()[:2] == ["40.2", "60.4"]
    assert "2025" in page.inner_text("#answer-origin")
    page.click("#more summary")
    page.select_option("#choose-metric", "peak_bytes/allocator")
    assert page.inner_text("#table-title").lower().startswith("peak memory (mb)")
    page.go_back()
    page.go_back()
    assert page.input_value("#choose-layer") != "Linear 512 -> 512"


def test_a_link_restores_the_view(opened: Open) -> None:
    """The address has choice, order, filter and open variant, so another reader gets the same view."""
    page = opened()
    page.select_option("#choose-layer", "Linear 512 -> 512")
    page.fill("#filter", "r")
    page.click("#dots thead button >> text=variant")
    page.click("#dots >> text=LowRank(rank=1)")
    reopened = opened(link=f"#{page.url.partition('#')[2]}")
    for selector in ("h1", "#dots", "#table-title"):
        assert reopened.inner_text(selector) == page.inner_text(selector)
    assert reopened.locator("#dots .detail").count() == 1
    assert reopened.inner_text("#status") == ""
    page.click("#copies >> text=Copy link")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


def test_any_link_shows_a_view(opened: Open) -> None:
    """A link to data that the page lacks shows the nearest view and a message, a damaged one the first."""
    for link in ("device=Nowhere", "phase=%00", "members=-1&run=x", "open=Unheard%20of", "metric=<b>"):
        page = opened(link=f"#{link}")
        assert page.inner_text("#status").startswith("Not in this page: "), link
        assert page.inner_text("h1").startswith(("Use ", "Fastest ")), link
    for link in ("#", "#&&=&", "#%", "#nothing", f"#a={'x' * 5000}"):
        assert opened(link=link).inner_text("h1") == "Use Hadamard", link


def test_code_and_tables_are_copied(opened: Open) -> None:
    """Code, Markdown and CSV are copied as they are shown; CSV has no formula of a spreadsheet."""
    page = opened(link="#open=LowRank(rank%3D1)")
    page.locator("#dots .code button").click()
    assert page.evaluate("navigator.clipboard.readText()") == CODE
    page.click("#copies >> text=Copy as Markdown")
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert lines[0].startswith("| variant | n\\_eff / ms |")
    assert lines[2] == "| Hadamard | 205 | 205 | 40.0x | 5.00x | 100 | 5.00 | 1.00 |"
    page.click("#copies >> text=Copy as CSV")
    csv = page.evaluate("navigator.clipboard.readText()")
    assert "LowRank(rank=1),171,171,33.3," in csv
    assert "SparsePerturbed(k=1),,,,,,,,,unavailable: out of memory" in csv
    hostile = opened([synthetic.run([time_row(variant("=1+1,\n"), linear(), 1.0)])], name="hostile")
    hostile.click("#copies >> text=Copy as CSV")
    assert "\n\"'=1+1," in hostile.evaluate("navigator.clipboard.readText()").replace("\r\n", "\n")


def test_planted_scripts_do_not_run(opened: Open) -> None:
    """A script in the name of a variant or device, a reason or a label is shown as text everywhere."""
    page = opened([hostile_run(), usual_run()], f"#device=GPU{'x'}", left_out=[ALERT])
    page.select_option("#choose-device", index=1)
    assert ALERT in page.inner_text("#answer-where")
    assert ALERT in page.inner_text("#dots")
    assert f"unavailable: </script>{ALERT}" in page.inner_text("#dots")
    page.locator("#dots button", has_text=ALERT).first.click()
    link = "#open=<script>window.planted=true</script>&filter=<img src=x onerror=planted=true>&a=<b>"
    page.evaluate("link => { location.hash = link; }", link)
    page.locator("#status", has_text="variant <script>").wait_for()
    assert page.evaluate("window.planted") is None
    assert page.locator("#main script, #main img").count() == 0


def test_a_page_with_little_or_no_data_says_so(opened: Open) -> None:
    """Without runs, with one variant or with failures only, the page states that."""
    page = opened([], left_out=["left out, of another schema version: old-run"], name="none")
    assert page.inner_text("h1") == "No run to show"
    assert "of another schema version" in page.inner_text("#answer-notes")
    assert not page.is_visible("#choice")
    single = opened([synthetic.run([time_row(DENSE, linear(), 1.0)])], name="one")
    assert single.inner_text("h1") == "Fastest forward: Perturbed"
    assert single.locator("#dots tbody tr").count() == 1
    failures = [synthetic.skipped(v, linear(), "out of memory: 9 GB", "forward") for v in (DENSE, BASE)]
    failed = opened([synthetic.run(failures)], name="failed")
    assert failed.inner_text("h1").startswith("No variant has a number here")
    assert "unavailable: out of memory: 9 GB" in failed.inner_text("#dots")


def test_a_phone_shows_a_number_first(opened: Open) -> None:
    """At 360 pixels nothing is outside the page, long names included, and a value is on the first screen."""
    for runs, link in ((None, ""), (None, "#open=Hadamard"), ([hostile_run()], "")):
        page = opened(runs, link, viewport=PHONE, name=str(runs is None))
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert LONG in page.inner_text("#dots").replace("\n", "")
    first = opened(viewport=PHONE, name="True")
    box = first.locator("#answer-picks dd").first.bounding_box()
    assert box
    assert box["y"] + box["height"] < PHONE["height"]


@pytest.mark.xdist_group("committed page")
def test_committed_runs_are_drawn(opened: Open) -> None:
    """The page of the committed runs begins with a large population; exact estimates are arrows."""
    page = opened(committed_page())
    assert page.input_value("#choose-members") == "16384"
    assert page.inner_text("h1") == "Use Orthogonal"
    row = page.locator("#dots tbody tr", has_text="Orthogonal")
    assert row.locator("path.tip").count() == 1
    for layer in page.locator("#choose-layer option").all_inner_texts():
        page.select_option("#choose-layer", layer)
        assert "NaN" not in page.inner_html("#dots")
        assert page.locator("#dots svg.dots path").count() > 0, layer


def test_exact_and_tied_variants(opened: Open) -> None:
    """An exact estimate is an arrow and tied variants share the heading; the filter keeps dense noise."""
    times = [4.9, 5.0, 5.0, 5.0, 5.0, 5.3]
    kappas = dict.fromkeys((DENSE, variant("Hadamard"), variant("Flipped")), 0.0)
    others = [row for row in rows(kappas=kappas) if row.phase != "step" or row.variant != variant("Flipped")]
    page = opened(
        [synthetic.run([*others, time_row(variant("Flipped"), SQUARE, *times, phase="step")])], name="tied"
    )
    assert page.inner_text("h1") == "Use Hadamard or Flipped"
    assert "tied" in page.locator("#answer-picks .pick").nth(1).inner_text()
    page = opened([synthetic.run([*rows(), *orthogonal(SQUARE)])])
    assert page.inner_text("h1") == "Use Orthogonal"
    assert page.locator("#dots tbody tr").first.locator("path.tip").count() == 1
    page.fill("#filter", "orthogonal")
    assert page.locator("#dots tbody th button").all_inner_texts() == ["Orthogonal", "Perturbed"]
