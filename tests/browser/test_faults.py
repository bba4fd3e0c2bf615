"""The page with foreign, broken and very many runs."""

import msgspec
import pytest

from tests import synthetic
from tests.browser.conftest import Open
from tests.report.ranking_cases import LOW_RANK, SQUARE, figure
from tests.report.web_cases import ALERT, LONG, evil, usual
from tests.synthetic import DENSE

PLANT = """() => {
  const one = document.createElement("script");
  one.textContent = "window.planted = true";
  window.stopped = new Promise((done) => {
    addEventListener("securitypolicyviolation", () => done(true));
    setTimeout(() => done(false), 2000);
  });
  document.body.append(one);
}"""


def test_planted_scripts_do_not_run(opened: Open) -> None:
    """A script in the name of a variant or device, a reason or a label is shown as text everywhere."""
    page = opened([evil()])
    assert ALERT in page.inner_text("#answer-where")
    table = page.inner_text("#table")
    assert ALERT in table
    assert f"unavailable: </script>{ALERT}" in table
    page.locator("#table button.link", has_text=ALERT).first.click()
    assert ALERT in page.inner_text("#detail-title")
    page.keyboard.press("Escape")
    link = "#variant=<script>window.planted=true</script>&filter=<img src=x onerror=planted=true>"
    page.evaluate("link => { location.hash = link; }", link)
    page.locator("#status", has_text="variant <script>").wait_for()
    assert page.evaluate("window.planted") is None
    assert page.locator("#main script, #main img, dialog script, dialog img").count() == 0


def test_a_script_that_got_in_would_not_run(opened: Open) -> None:
    """As a second defence, the page's content security policy blocks a foreign script."""
    page = opened([usual()], expected="Content Security Policy")
    page.evaluate(PLANT)
    assert page.evaluate("window.stopped")
    assert page.evaluate("window.planted") is None


def test_long_names_break_nothing(opened: Open) -> None:
    """A name of 200 characters neither widens the page nor hides the figures, also at phone width."""
    page = opened([evil()], viewport={"width": 390, "height": 844})
    assert LONG in page.inner_text("#table").replace("\n", "")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_bars_begin_at_nothing(opened: Open) -> None:
    """Bars start at 0, so a negative figure, such as a kappa, is in the table but has no bar."""
    kappas = [
        figure(one, SQUARE, "kappa", "linear fitness", value, value)
        for one, value in ((DENSE, -0.5), (LOW_RANK, 0.5))
    ]
    page = opened([synthetic.run(kappas)])
    assert "-0.5" in page.locator("#table tbody tr", has_text="PerturbedLinear").inner_text()
    assert page.locator("#bars g.chosen > text:first-of-type").all_text_contents() == [
        "LowRankLinear(rank=1)"
    ]


def test_odd_numbers_are_no_picture(opened: Open) -> None:
    """Figures of 1e24 or 0 are drawn or left out; no coordinate of a picture is NaN."""
    case = synthetic.linear()
    rows = [synthetic.time_row(synthetic.BASE, case, 1.0), synthetic.time_row(synthetic.DENSE, case, 0.0)]
    odd = synthetic.time_row(synthetic.variant("Huge"), case, 1.0)
    page = opened([synthetic.run([*rows, msgspec.structs.replace(odd, samples=((1e24,),))])])
    assert "NaN" not in page.inner_html("#figures")
    assert "Infinity" not in page.inner_html("#figures")
    assert page.locator("#table tbody tr").count() == 3


@pytest.mark.parametrize("count", [1, 3])
def test_little_is_enough(opened: Open, count: int) -> None:
    """The page can be drawn for a run of a single row."""
    page = opened([synthetic.run(synthetic.three(synthetic.linear())[:count])])
    assert page.locator("#table tbody tr").count() == count
