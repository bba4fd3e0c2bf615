"""The command that draws one picture."""

import sys
from pathlib import Path

import pytest

from esbench.cli import main
from esbench.report.pictures import PICTURES
from tests.history_cases import stored
from tests.picture_cases import RUNS, multiplied, sampled, swept
from tests.report_cases import a_run, store

Captured = pytest.CaptureFixture[str]


def plot(*arguments: str) -> int:
    """Run the command; return its exit code."""
    sys.argv = ["esbench", "plot", *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize("arguments", [(), ("--list",), ("multipliers", "--list")])
def test_pictures_are_listed_a_line_each(capsys: Captured, arguments: tuple[str, ...]) -> None:
    """Without a name, or asked to, it says of each picture what it shows."""
    assert plot(*arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PICTURES)
    assert all(PICTURES[line.split()[0]].description in line for line in lines)


@pytest.mark.parametrize("name", sorted(RUNS))
def test_any_picture_is_drawn_from_stored_runs(tmp_path: Path, capsys: Captured, name: str) -> None:
    """One file is written, and stderr says what it shows and of which run."""
    results = stored(tmp_path, RUNS[name])
    out = tmp_path / "deep" / "a.svg"
    assert plot(name, "--results", str(results), "--out", str(out)) == 0
    assert out.read_text(encoding="utf-8").startswith("<?xml")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"{out}: Linear")
    assert "Test CPU" in captured.err


@pytest.mark.parametrize(
    ("kind", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".pdf", b"%PDF"), (".PDF", b"%PDF")]
)
def test_the_name_of_the_file_says_the_kind(tmp_path: Path, kind: str, begins: bytes) -> None:
    """Vector graphics for a paper and a page, and an image; the same run gives the same bytes."""
    results = stored(tmp_path, [multiplied()])
    for stem in ("a", "b"):
        assert plot("multipliers", "--results", str(results), "--out", str(tmp_path / f"{stem}{kind}")) == 0
    content = (tmp_path / f"a{kind}").read_bytes()
    assert content.startswith(begins)
    assert content == (tmp_path / f"b{kind}").read_bytes()


def test_width_is_that_of_a_column_or_a_page(tmp_path: Path) -> None:
    """3.3 and 6.9 inches are 237.6 and 496.8 points."""
    results = stored(tmp_path, [multiplied()])
    for width, points in (("column", "237.6pt"), ("page", "496.8pt")):
        out = tmp_path / f"{width}.svg"
        assert plot("multipliers", "--results", str(results), "--width", width, "--out", str(out)) == 0
        assert f'width="{points}"' in out.read_text(encoding="utf-8")[:600]


def test_a_run_can_be_named(tmp_path: Path, capsys: Captured) -> None:
    """By its file, by its suite or by its device's folder; otherwise the newest that is whole is taken."""
    store(tmp_path, a_run("20260101T000000Z-quick-0001"))
    older = store(tmp_path, a_run("20250101T000000Z-readme-0002", suite="readme"))
    store(tmp_path, a_run("20240101T000000Z-quick-0003", device_name="GPU 1"))
    out = ("--out", str(tmp_path / "a.svg"))
    results = ("--results", str(tmp_path / "results"))
    for arguments, run in (
        (("--device", "test-cpu", *results), "quick-0001"),
        (("--device", "test-cpu", "--suite", "readme", *results), "readme-0002"),
        (("--run", str(tmp_path / older)), "readme-0002"),
        (("--device", "gpu-1", *results), "quick-0003"),
    ):
        assert plot("multipliers", *arguments, *out) == 0
        assert run in capsys.readouterr().err


def test_choices_narrow_what_is_drawn(tmp_path: Path, capsys: Captured) -> None:
    """Operator, shape, phase, variants and number format reach the picture."""
    results = stored(tmp_path, [a_run()])
    choices = ("--operator", "Conv2d", "--phase", "update", "--dtype", "float32", "--cases", "(16,*")
    out = ("--out", str(tmp_path / "a.svg"))
    assert plot("multipliers", "--results", str(results), *choices, "--variants", "Perturbed", *out) == 0
    assert "Conv2d: update time against base" in capsys.readouterr().err


def test_samples_of_two_variants(tmp_path: Path) -> None:
    """Two globs choose whose samples are compared."""
    results = stored(tmp_path, [sampled()])
    out = tmp_path / "a.svg"
    chosen = ("--variants", "Base", "--variants", "Perturbed")
    assert plot("samples", "--results", str(results), *chosen, "--out", str(out)) == 0
    text = out.read_text(encoding="utf-8")
    assert "<!-- Base -->" in text
    assert "<!-- Perturbed -->" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nope --out a.svg", "no picture 'nope'; there are: pareto, multipliers, "),
        ("multipliers", "name a file to write: esbench plot multipliers --out multipliers.svg"),
        ("multipliers --out a.gif", "--out a.gif: name a file that ends in .svg, .png, .pdf"),
        ("multipliers --out a", "--out a: name a file that ends in .svg, .png, .pdf"),
        ("multipliers --out a.svg --width poster", "--width poster: there are column and page"),
        (
            "multipliers --out a.svg --phase quality",
            "no phase 'quality' is timed; there are: sample, forward",
        ),
        (
            "multipliers --out a.svg --operator Conv9d",
            "no operator matches 'Conv9d' in these runs; there are:",
        ),
        ("multipliers --out a.svg --cases nope", "no case matches 'nope' in these runs; there are: Linear("),
        ("multipliers --out a.svg --variants nope", "no variant matches 'nope' in these runs; there are: "),
        ("multipliers --out a.svg --dtype int1", "no dtype matches 'int1' in these runs; there are: float32"),
        (
            "multipliers --out a.svg --metric power_w",
            "nothing to draw with metric power_w: multipliers needs",
        ),
        ("pareto --out a.svg", "nothing to draw: pareto needs a run with the phases step and quality"),
        ("pareto --out a.svg --phase update", "pareto shows figures of its own: leave --phase away"),
        ("kappa --out a.svg", "nothing to draw: kappa needs a run with the phase quality"),
        ("history --out a.svg", "nothing to draw: history needs two complete and valid runs"),
        ("gate-power --out a.svg", "nothing to draw: gate-power needs a study of the gate"),
        ("multipliers --out a.svg --device nope", "no device 'nope' has runs in"),
        ("multipliers --out a.svg --suite nope", "no run of suite 'nope'; there are: quick"),
        ("multipliers --out a.svg --results no/such", "no folder no/such: measure with `esbench run`"),
        ("multipliers --out a.svg --run no.jsonl", "--run takes a file such as results/"),
        ("multipliers --out . ", "--out .: name a file that ends in"),
        ("multipliers --nope", "No such option: --nope"),
    ],
)
def test_bad_usage_is_one_line(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    """The line says what there is, the exit code is 2, nothing is on stdout and nothing is written."""
    stored(tmp_path, [swept()])
    monkeypatch.chdir(tmp_path)
    assert plot(*arguments.split()) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_damaged_file_is_said_and_the_rest_is_drawn(tmp_path: Path, capsys: Captured) -> None:
    """A line that cannot be read is named; what else there is has its picture."""
    results = stored(tmp_path, [multiplied()])
    with next(results.rglob("*.jsonl")).open("a") as file:
        file.write('{"record": "measurement"\n')
    assert plot("multipliers", "--results", str(results), "--out", str(tmp_path / "a.svg")) == 0
    assert "no valid JSON" in capsys.readouterr().err
    assert (tmp_path / "a.svg").exists()


def test_help_has_an_example(capsys: Captured) -> None:
    """It can be copied."""
    assert plot("--help") == 0
    assert "esbench plot multipliers --operator Linear --width column --out multipliers.pdf" in " ".join(
        capsys.readouterr().out.split()
    )
