"""Pictures where a page shows them."""

from pathlib import Path

import pytest

from esbench.errors import UserError
from esbench.report.illustrations import illustration, image
from tests.picture_cases import RUNS, picture, renamed

RUN = RUNS["multipliers"][0].header.run_id


def page(folder: Path) -> str:
    """A page beside a folder with a picture."""
    (folder / "reports").mkdir()
    picture("multipliers").write(folder / "reports" / "a.svg")
    return str(folder / "README.md")


def test_a_page_shows_a_picture_of_its_run(tmp_path: Path) -> None:
    """Its alternative text is the picture's title and where its figures come from."""
    text = illustration(page(tmp_path), "reports/a.svg", RUN)
    origin = f"commit 0123456, float32, 1024 x 1 (members x repeats), method host, run {RUN}"
    alternative = f"Linear: forward time against the plain layer - Test CPU (2 threads), {origin}"
    assert text == f'\n<img src="reports/a.svg" alt="{alternative}" width="900">\n'
    narrow = illustration(str(tmp_path / "README.md"), "reports/a.svg", f"results/cpu/{RUN}.jsonl", 400)
    assert 'width="400"' in narrow


@pytest.mark.parametrize(
    ("file", "run", "words"),
    [
        (
            "reports/a.svg",
            "20990101T000000Z-quick-9999",
            "is no picture of run 20990101T000000Z-quick-9999, but",
        ),
        ("reports/b.svg", "", "No such file"),
        ("README.md", "", "does not say what it shows: write it with `esbench report`"),
        ("reports", "", "reports: "),
    ],
)
def test_a_picture_of_something_else_is_refused(tmp_path: Path, file: str, run: str, words: str) -> None:
    """No picture, a foreign one, and one of another run end in one line that says what to do."""
    Path(page(tmp_path)).write_text("# Title\n")
    with pytest.raises(UserError, match=r"esbench report|but of") as raised:
        illustration(str(tmp_path / "README.md"), file, run)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_nothing_in_a_title_is_live(tmp_path: Path) -> None:
    """Quotes and markup of a foreign run stay in the attribute."""
    assert image('"><script>.svg', 'a "b" <c>\nd') == (
        '<img src="&quot;&gt;&lt;script&gt;.svg" alt="a &quot;b&quot; &lt;c&gt; d" width="900">'
    )
    sheet = picture("multipliers", [renamed(RUNS["multipliers"][0], '"><script>&amp;')])
    (tmp_path / "reports").mkdir()
    sheet.write(tmp_path / "reports" / "a.svg")
    text = illustration(str(tmp_path / "README.md"), "reports/a.svg")
    assert 'alt="&quot;&gt;&lt;script&gt;&amp;amp;: forward time' in text
    assert "<script" not in text
