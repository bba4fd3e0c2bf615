"""The page's detail view of one variant."""

from tests.browser.conftest import Open

LOW_RANK = "#variant=LowRank(rank%3D1)&shape=(512, 512)&phase=forward"


def test_a_variant_opens(opened: Open) -> None:
    """Clicking a name in the table shows formula, source, closed forms, figures and two lines of code."""
    page = opened()
    page.click("#table >> text=LowRankLinear(rank=1)")
    detail = page.inner_text("#detail")
    assert page.inner_text("#detail .formula") == "E_m = up_m @ down_m / sqrt(rank)."
    assert "arXiv:2511.16652" in detail
    assert "n * rank * (o + i) numbers." in detail
    assert "Kappa of the quality law" in detail
    assert page.inner_text("#usage").split("\n") == [
        "from impls import LowRank, perturb",
        "population = perturb(model, LowRank(rank=1), members=1024, sigma=0.02)",
    ]
    page.click("#detail-close")
    assert not page.is_visible("#detail")
    page.wait_for_url(lambda url: "variant=" not in url, timeout=5000)


def test_what_was_measured_of_it(opened: Open) -> None:
    """The detail has time, interval, roofline bound, minimum work and peak memory of the selected case."""
    page = opened(link=LOW_RANK)
    table = page.locator("#detail table").first
    heads, found = (table.locator(where).all_inner_texts() for where in ("thead th", "tbody tr > *"))
    cells = dict(zip(heads, found, strict=True))
    assert cells["Phase"] == "forward (host)"
    assert cells["Time (ms)"] == "39.2"
    assert cells["95 % interval"] == "39.0 to 39.5"
    assert cells["vs. base"] == "1.50x"
    assert cells["Minimum flops"] == "10,000"
    assert cells["Peak (MB)"] == "1.50"


def test_a_variant_without_docstring(opened: Open) -> None:
    """A variant without a stored docstring has its measurements and a note."""
    page = opened(link="#variant=Hadamard")
    assert "No run stores the docstring of Hadamard" in page.inner_text("#detail")
    assert "Measured" in page.inner_text("#detail")
    assert page.locator("#usage").count() == 0


def test_a_click_beside_it_closes(opened: Open) -> None:
    """A click outside the detail or Escape closes it, and the focus returns to its name."""
    page = opened()
    page.click("#table >> text=LowRankLinear(rank=1)")
    page.keyboard.press("Escape")
    assert not page.is_visible("#detail")
    page.locator(":focus", has_text="LowRankLinear(rank=1)").wait_for()
    page.click("#table >> text=LowRankLinear(rank=1)")
    page.mouse.click(5, 5)
    assert not page.is_visible("#detail")
    linked = opened(link=LOW_RANK)
    linked.keyboard.press("Escape")
    linked.locator(":focus", has_text="LowRankLinear(rank=1)").wait_for()


def test_a_bar_and_a_point_open_it(opened: Open) -> None:
    """Bars and points in the pictures open a variant as well."""
    page = opened()
    page.locator("#bars g.chosen", has_text="LowRankLinear(rank=1)").first.click()
    assert page.inner_text("#detail-title") == "LowRankLinear(rank=1)"
    page.keyboard.press("Escape")
    page.locator("#pareto text", has_text="Hadamard").click()
    assert page.inner_text("#detail-title") == "HadamardLinear"
