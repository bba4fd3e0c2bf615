"""The README's generated blocks."""

from pathlib import Path

import pytest

from esbench.report.pages import console_tables
from esbench.report.readme import Page, ReadmeError, render
from tests.report_cases import a_run, readme, store


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        ("page.linear(run)", ["Linear, forward", "Speed multiplier vs. naive", "| PerturbedLinear"]),
        ("page.conv2d(run)", ["Conv2d, forward", "(16, 16, (3, 3), (64, 64))"]),
        ("page.phases(run, 'Linear')", ["Linear, update", "its forward of the same case stands in"]),
        ("page.phases(run, 'Linear', 'update')", ["Linear, update"]),
        ("page.memory(run, 'Linear')", ["Peak memory above the level before the call (MB)"]),
        ("page.roofline(run, 'Linear')", ["Percent of the floor (%)", "ceilings of this device"]),
        ("page.others(run, 'Linear')", ["Launches of one call"]),
        ("page.published_beside(run, gtx)", ["measured / published", "GeForce GTX 1080 Ti"]),
        ("page.linear(gtx)", ["published by others", "SparsePerturbedLinear(k=1)"]),
        ("page.console(run)", ["```text", "Linear, forward: time"]),
    ],
)
def test_block_becomes_its_table(tmp_path: Path, call: str, parts: list[str]) -> None:
    """Each function of a page puts its tables between the markers of its block."""
    path = readme(tmp_path, call)
    diff = render(path, check=False)
    text = path.read_text(encoding="utf-8")
    assert all(part in text for part in parts)
    assert text.startswith("# Title\n")
    assert all(f"+{line}" in diff for line in text.splitlines() if line.startswith("|"))


def test_a_table_of_a_page_that_is_generated_is_taken_over(tmp_path: Path) -> None:
    """The first below its heading, and no other; a page, heading or table that is not there is named."""
    text = "# A\n\n| no |\n\n### B\n\nwords\n\n| a |\n| 1 |\n\n| b |\n\n### C\n\nnone\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    page = Page(tmp_path)
    assert page.excerpt("page.md", "B") == "\n| a |\n| 1 |\n\n"
    for file, heading, words in (
        ("page.md", "C", "page.md: there is no table below 'C'"),
        ("page.md", "D", "page.md: there is no table below 'D'"),
        ("other.md", "B", "other.md: "),
    ):
        with pytest.raises(ReadmeError, match=words):
            page.excerpt(file, heading)


def test_check_changes_nothing(tmp_path: Path) -> None:
    """A check reports what would change as a diff and leaves the file as it is."""
    path = readme(tmp_path, "page.linear(run)")
    before = path.read_bytes()
    diff = render(path, check=True)
    assert path.read_bytes() == before
    assert diff.startswith(f"--- {path}\n+++ {path} as generated\n")


def test_rendered_page_is_clean(tmp_path: Path) -> None:
    """After it was generated, a check finds nothing to change."""
    path = readme(tmp_path, "page.linear(run)", "page.console(run)")
    assert render(path, check=False)
    assert render(path, check=True) == ""


def test_typed_number_is_found(tmp_path: Path) -> None:
    """A figure that somebody typed over is in the diff of a check."""
    path = readme(tmp_path, "page.linear(run)")
    render(path, check=False)
    path.write_text(path.read_text(encoding="utf-8").replace("3.00x", "2.00x"), encoding="utf-8")
    diff = render(path, check=True)
    changed = [line.split()[0] + line.split()[-2] for line in diff.splitlines() if "PerturbedLinear" in line]
    assert changed == ["-|2.00x", "+|3.00x"]


def test_new_local_run_changes_nothing(tmp_path: Path) -> None:
    """A run that the README does not name does not change it."""
    path = readme(tmp_path, "page.linear(run)")
    render(path, check=False)
    store(tmp_path, a_run("20270101T000000Z-quick-0002", factor=9.0))
    assert render(path, check=True) == ""


@pytest.mark.parametrize(
    ("call", "part"),
    [
        ("page.linear('results/nowhere.jsonl')", "nowhere.jsonl: cannot be read"),
        ("page.memory(run, 'Conv3d')", "holds no such table"),
        ("page.unheard(run)", "no attribute 'unheard'"),
        ("1/0", "division by zero"),
        ("page.(", "is not Python"),
    ],
)
def test_block_that_raises_is_one_line(tmp_path: Path, call: str, part: str) -> None:
    """A block that cannot be run is named by file in one line, and the README stays as it was."""
    path = readme(tmp_path, call)
    before = path.read_bytes()
    with pytest.raises(ReadmeError) as raised:
        render(path, check=False)
    message = str(raised.value)
    assert str(path) in message
    assert part in message
    assert "\n" not in message
    assert path.read_bytes() == before


def test_half_a_run_is_no_source(tmp_path: Path) -> None:
    """A README is not generated from a file with a line that cannot be read."""
    file = tmp_path / store(tmp_path, a_run())
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ReadmeError, match="half a line"):
        Page(tmp_path).linear(str(file.relative_to(tmp_path)))


@pytest.mark.parametrize("content", [None, b"\xff", b"[[[cog\n", b"[[[cog\n]]]\n"])
def test_unreadable_readme_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    """A README that is missing, not text or lacks a marker is said in one line."""
    path = tmp_path / "README.md"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReadmeError) as raised:
        render(path, check=True)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_console_is_what_a_page_shows(tmp_path: Path) -> None:
    """The console block of a page is what the terminal shows after that run."""
    shown = Page(tmp_path).console(store(tmp_path, a_run()))
    assert shown == f"```text\n{console_tables(a_run())}```\n"
