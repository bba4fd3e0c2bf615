"""The generated blocks of the README."""

from pathlib import Path

import pytest

from esbench.errors import UserError
from esbench.report.readme import Page, render
from esbench.schema import Variant
from tests.report import ranking_cases
from tests.report.report_cases import a_run, readme, store
from tests.synthetic import linear, time_row


def test_blocks_become_their_tables(tmp_path: Path) -> None:
    """Each function of a page puts its tables between the markers of its block."""
    calls = {
        "page.phases(run, 'Linear')": ["Linear, update", "its forward of the same case stands in"],
        "page.phases(run, 'Linear', 'forward')": ["Linear, forward", "Speed multiplier vs. naive"],
        "page.phases(run, 'Conv2d', 'forward')": ["Conv2d, forward", "(16, 16, (3, 3), (64, 64))"],
        "page.phases(gtx, 'Linear', 'forward')": ["published by others", "SparsePerturbedLinear(k=1)"],
        "page.memory(run, 'Linear')": ["Linear, forward: peak memory"],
        "page.published(run, gtx, rtx)": [
            "<summary>Linear: Test CPU / GeForce GTX 1080 Ti / GeForce RTX 2070</summary>",
            "measured / GeForce RTX 2070",
            "</details>",
        ],
    }
    path = readme(tmp_path, *calls)
    diff = render(path, check=False)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Title\n")
    assert all(f"+{line}" in diff for line in text.splitlines() if line.startswith("|"))
    for call, parts in calls.items():
        printed = text.partition(f"cog.out({call})")[2].partition("[[[end]]]")[0]
        assert all(words in printed for words in [*parts, "| Perturbed"]), call


def ranked(folder: Path) -> str:
    """Store a run with a ranking whose first variant is a baseline; return its file's name."""
    loop = Variant(scheme="Loop", baseline=True)
    fast = time_row(loop, ranking_cases.SQUARE, 0.1, 0.1, phase="step")
    baseline = [fast, *ranking_cases.qualities(loop, ranking_cases.SQUARE, 0.0)]
    measured_rows = [*ranking_cases.rows(), *baseline, *ranking_cases.orthogonal(BIG)]
    return store(folder, ranking_cases.run(measured_rows))


BIG = linear(64, members=4096)


def test_the_best_schemes_have_a_row_per_layer(tmp_path: Path) -> None:
    """A layer is shown at its largest population at which dense noise has a rate, with both multiples."""
    page, file = Page(tmp_path), ranked(tmp_path)
    (row,) = [line for line in page.best_schemes(file).splitlines() if line.startswith("| Linear 64")]
    assert row == "| Linear 64 -\\> 64 | 1,024 | Hadamard | 40.0x | 5.00x | 5.00 | 1.00 |"
    with pytest.raises(UserError, match="dense noise has no n_eff per ms on any case"):
        page.best_schemes(store(tmp_path, a_run()))


def test_published_figures_of_one_operator() -> None:
    """A glob selects the operators; one that matches nothing is an error."""
    page = Page(Path(__file__).parents[2])
    files = ("results/published/nesgpu_gtx1080ti.jsonl", "results/published/nesgpu_rtx2070.jsonl")
    assert "<summary>Linear" in page.published(*files, operator="Linear")
    assert "<summary>Conv2d" not in page.published(*files, operator="Linear")
    with pytest.raises(UserError, match="no variant has a time of its forward on the same shape"):
        page.published(*files, operator="Attention")


def test_the_output_of_recommend_is_a_block(tmp_path: Path) -> None:
    """The block has the command's answer and code; an error names the layers that the run ranks."""
    page, file = Page(tmp_path), ranked(tmp_path)
    shown = page.recommendation(file, "Linear(64, 64)")
    assert shown.startswith(
        "\n```text\nLinear 64 -> 64, 1024 members: use Hadamard.\nfrom impls import perturb\n"
        "# Hadamard is not registered: name its plug-in with --plugin\n"
        "population = perturb(model, Hadamard(), members=1024, sigma=0.02)\n\n"
    )
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.strip().splitlines()) <= 2 + 12  # the fence
    with pytest.raises(UserError, match=r"has no n_eff per ms for 'Linear\(1, 1\)': use one of"):
        page.recommendation(file, "Linear(1, 1)")


def test_a_ranking_of_chosen_variants(tmp_path: Path) -> None:
    """Only variants that match a glob have a row; a page in docs names files from the repository's root."""
    page = Page.of(str(tmp_path / "docs" / "schemes.md"))
    assert page.root == tmp_path
    shown = page.ranking(ranked(tmp_path), "Linear(64, 64)", variants=("Flipped*", "Perturbed"))
    rows = [line.split(" | ")[0] for line in shown.splitlines() if line.startswith("| ")]
    expected = ["FlippedLinear(cores=8)", "FlippedLinear", "PerturbedLinear"]
    assert rows == ["| Linear", "| :-", *(f"| {name}" for name in expected)]


def test_a_picture_has_the_caption_of_its_run(tmp_path: Path) -> None:
    """Markup in its caption is escaped; a missing file, title or match with the run is an error."""
    caption = '<dc:title>&lt;b> &amp; "c"</dc:title><dc:description>run 2027-a</dc:description>'
    (tmp_path / "a.svg").write_text(f"<svg>{caption}</svg>")
    (tmp_path / "README.md").write_text("# Title")
    page = Page(tmp_path)
    assert page.picture("a.svg", "results/cpu/2027-a.jsonl") == (
        '\n<img src="a.svg" alt="&lt;b&gt; &amp; &quot;c&quot; - run 2027-a" width="900">\n\n'
    )
    for file, run, words in (
        ("a.svg", "2027-b", r"a\.svg is not a figure of run 2027-b, but of run 2027-a: write"),
        ("c.svg", "2027-a", r"c\.svg: .*esbench report"),
        ("README.md", "2027-a", "README.md has no title: write it with `esbench report`"),
    ):
        with pytest.raises(UserError, match=words):
            page.picture(file, f"results/cpu/{run}.jsonl")


def test_an_excerpt_is_the_first_table_below_a_heading(tmp_path: Path) -> None:
    """Only the first table below the heading is copied; a missing page, heading or table is an error."""
    text = "# A\n\n| no |\n\n### B\n\nwords\n\n| a |\n| 1 |\n\n| b |\n\n### C\n\nnone\n"
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    page = Page(tmp_path)
    assert page.excerpt("page.md", "B") == "\n| a |\n| 1 |\n\n"
    for file, heading, words in (
        ("page.md", "C", "page.md: there is no table below 'C'"),
        ("page.md", "D", "page.md: there is no table below 'D'"),
        ("other.md", "B", "other.md: "),
    ):
        with pytest.raises(UserError, match=words):
            page.excerpt(file, heading)


def test_a_check_prints_the_changes(tmp_path: Path) -> None:
    """A check writes nothing; its diff shows typed numbers, but not runs that the README does not name."""
    path = readme(tmp_path, "page.phases(run, 'Linear', 'forward')")
    before = path.read_bytes()
    diff = render(path, check=True)
    assert path.read_bytes() == before
    assert diff.startswith(f"--- {path}\n+++ {path} as generated\n")
    assert render(path, check=False)
    store(tmp_path, a_run("20270101T000000Z-quick-0002", factor=9.0))
    assert render(path, check=True) == ""
    path.write_text(path.read_text(encoding="utf-8").replace("3.00x", "2.00x"), encoding="utf-8")
    diff = render(path, check=True)
    changed = [line.split()[0] + line.split()[-2] for line in diff.splitlines() if "PerturbedLinear" in line]
    assert changed == ["-|2.00x", "+|3.00x"]


def test_an_error_in_a_block_is_one_line(tmp_path: Path) -> None:
    """A block that raises, a truncated file and a README without readable blocks are named in one line."""
    path = readme(tmp_path, "CALL")
    text = path.read_text(encoding="utf-8")
    half = tmp_path / store(tmp_path, a_run("20270101T000000Z-quick-0002"))
    half.write_bytes(half.read_bytes()[:-5])
    bad = tmp_path / store(tmp_path, a_run("20270101T000000Z-quick-0003"))
    bad.write_bytes(bad.read_bytes() + b"{}\n" * 100)
    for call, words in (
        (f"page.phases({str(bad.relative_to(tmp_path))!r}, 'Linear')", "100 lines could not be read"),
        ("page.phases('results/nowhere.jsonl', 'Linear')", "nowhere.jsonl: cannot be read"),
        (f"page.phases({str(half.relative_to(tmp_path))!r}, 'Linear')", "half a line"),
        ("page.phases(run, 'Conv3d')", "has no results for a block"),
        ("page.unheard(run)", "no attribute 'unheard'"),
        ("1/0", "division by zero"),
        ("page.(", "is not valid Python"),
    ):
        path.write_text(text.replace("CALL", call), encoding="utf-8")
        before = path.read_bytes()
        with pytest.raises(UserError) as raised:
            render(path, check=False)
        message = str(raised.value)
        assert str(path) in message
        assert words in message
        assert "\n" not in message
        assert path.read_bytes() == before
    for content in (b"\xff", b"[[[cog\n", b"[[[cog\n]]]\n"):
        path.write_bytes(content)
        with pytest.raises(UserError) as raised:
            render(path, check=True)
        assert str(path) in str(raised.value)
        assert "\n" not in str(raised.value)
