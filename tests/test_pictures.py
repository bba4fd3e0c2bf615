"""What holds for every picture of the table."""

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.typing import ColorType
from PIL import Image

from esbench.errors import UserError
from esbench.records import Run
from esbench.report import drawing, pictures
from esbench.report.drawing import COLUMN, PAGE, Paper
from esbench.report.pictures import PICTURES
from esbench.report.sheets import Sheet
from esbench.report.wishes import Source, Wish
from tests import synthetic
from tests.picture_cases import HISTORY, ODD, RUNS, multiplied, picture, placed, renamed, sampled
from tests.synthetic import BASE, DENSE, linear, time_row

NAMES = sorted(RUNS)
PAPERS = [COLUMN, PAGE]


def test_every_picture_can_be_drawn_here() -> None:
    """Tests know a run for each picture of the table; the gate's own is drawn from a study."""
    assert set(RUNS) == set(PICTURES) - {"gate-power"}
    assert all(one.name == name and one.description and one.needs for name, one in PICTURES.items())


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.name)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_clipped_and_nothing_runs_into_the_title_or_the_foot(name: str, paper: Paper) -> None:
    """Every text is inside the paper, as wide as was asked for; panels keep clear of title and foot."""
    sheet = picture(name, wish=Wish(paper=paper))
    hold_inside(sheet, paper)


@pytest.mark.parametrize("odd", ODD, ids=[str(number) for number in range(len(ODD))])
@pytest.mark.parametrize("name", NAMES)
def test_odd_names_are_drawn_as_words(tmp_path: Path, name: str, odd: str) -> None:
    """Formulas, markup, emoji, 200 characters and none at all stay text inside the paper, in sound files."""
    sheet = picture(name, [renamed(run, odd) for run in RUNS[name]])
    hold_inside(sheet, COLUMN)
    sheet.write(tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    root = ET.fromstring(text)  # noqa: S314  a file of our own
    assert not [one for one in root.iter() if one.tag.endswith("script")]


@pytest.mark.parametrize("name", NAMES)
def test_same_runs_same_bytes(tmp_path: Path, name: str) -> None:
    """Drawn twice, a picture has the same bytes in every format, and no date in them."""
    for stem in ("a", "b"):
        sheet = picture(name)
        for kind in drawing.KINDS:
            sheet.write(tmp_path / f"{stem}{kind}")
    for kind in drawing.KINDS:
        content = (tmp_path / f"a{kind}").read_bytes()
        assert content == (tmp_path / f"b{kind}").read_bytes()
        assert not any(word in content for word in (b"<dc:date>", b"CreationDate", b"tIME"))


@pytest.mark.parametrize("name", NAMES)
def test_the_last_digits_of_a_layout_reach_no_file(name: str) -> None:
    """Panels stand at rounded places: the solver that finds them is not exact, and ids would differ."""
    for axes in picture(name).axes:
        bounds = axes.get_position().bounds
        assert bounds == pytest.approx([round(end, 6) for end in bounds], abs=1e-14, rel=0)


@pytest.mark.parametrize("name", NAMES)
def test_picture_says_where_its_figures_come_from(name: str) -> None:
    """The line at its foot has device, commit, number format and run; and the method, where there is one."""
    sheet = picture(name)
    assert sheet.origin.startswith("Test CPU")
    assert "float32" in sheet.origin
    assert ("01abcde" if name == "history" else "commit 0123456") in sheet.origin
    if name != "history":
        assert f"run {RUNS[name][0].header.run_id}" in sheet.origin
    if not name.startswith(("kappa", "kept-population", "spectrum", "memory")):
        assert "method host" in sheet.origin
    assert any("Test CPU" in words.text for words in placed(sheet))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"history"}))
def test_invalid_run_is_said_in_the_title(name: str) -> None:
    """A picture of a run that must not be used says so, and why, before anything else."""
    runs = []
    for run in RUNS[name]:
        assert run.end is not None
        end = msgspec.structs.replace(run.end, invalid=("other processes on the GPU",))
        runs.append(msgspec.structs.replace(run, end=end))
    assert picture(name, runs).heading.startswith("INVALID: other processes on the GPU. ")


@pytest.mark.parametrize("name", NAMES)
def test_picture_can_be_read_in_greyscale(name: str) -> None:
    """Series next to each other in a panel differ in mark, or clearly in how light they are."""
    for axes in picture(name).axes:
        for one, other in itertools.pairwise(series(axes)):
            assert one[0] != other[0] or abs(one[1] - other[1]) > 0.1, (one, other)


def test_twenty_series_differ_without_colour() -> None:
    """No two have the same mark with the same filling, neighbours' lines differ, and shades go to light."""
    looks = drawing.looks(20)
    assert len({(one.mark, one.filled) for one in looks}) == 20
    assert all(one.line != other.line for one, other in itertools.pairwise(looks))
    light = [luminance(one.color) for one in looks]
    assert light == sorted(set(light))
    assert light[-1] < 0.8  # on white the lightest can still be seen


def test_bars_differ_without_colour() -> None:
    """Bars of different shapes have other hatches, and are lighter from shape to shape."""
    axes = picture("multipliers").axes[0]
    first, second = (group.patches[0] for group in axes.containers if isinstance(group, BarContainer))
    assert first.get_hatch() != second.get_hatch()
    assert luminance(first.get_facecolor()) + 0.2 < luminance(second.get_facecolor())


@pytest.mark.parametrize("name", NAMES)
def test_picture_is_a_card_on_a_dark_page(tmp_path: Path, name: str) -> None:
    """Laid on a dark page every pixel stays as it is on a white one: the card is white and opaque."""
    picture(name).write(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as found:
        card = found.convert("RGBA")
    pages = (Image.new("RGBA", card.size, page) for page in ("#0d1117", "white"))
    on = [np.asarray(Image.alpha_composite(page, card)) for page in pages]
    assert (on[0] == on[1]).all()
    assert list(imread(tmp_path / "a.png")[0, 0][:3]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_small(tmp_path: Path, name: str) -> None:
    """An image has a table of colours: of a synthetic run a report's takes less than 45 kB."""
    picture(name, wish=Wish(paper=PAGE)).save(tmp_path / "a")
    with Image.open(tmp_path / "a.png") as found:
        assert found.mode == "P"
    assert (tmp_path / "a.png").stat().st_size < 45_000


@pytest.mark.parametrize("name", NAMES)
def test_unusable_samples_break_no_picture(tmp_path: Path, name: str) -> None:
    """NaN, infinities, huge, tiny and no samples are left out, or there is nothing to draw."""
    for value in (float("nan"), float("inf"), 1e24, 1e-24, 0.0, -5.0, None):
        samples = () if value is None else ((value,) * 3, (1.0, value, 2.0))
        runs = [spoilt(run, samples) for run in RUNS[name]]
        try:
            sheet = picture(name, runs)
        except UserError as error:
            assert str(error).startswith(("nothing to draw", "no run of", "no case"))  # noqa: PT017  or it is drawn
        else:
            sheet.write(tmp_path / "a.svg")


@pytest.mark.parametrize("low", [0.0011, 1.0, 2.1, 6.2, 730.0])
@pytest.mark.parametrize("ratio", [1.2, 1.8, 2.5, 6.0, 9.0, 1e3, 1e9])
@pytest.mark.parametrize("inches", [0.8, 2.0, 3.3])
def test_an_axis_has_two_numbers_or_more(low: float, ratio: float, inches: float) -> None:
    """However short a logarithmic axis is, it has a scale: and no more numbers than there is room for."""
    axes = Figure().add_subplot()
    axes.set(yscale="log", ylim=(low, low * ratio))
    drawing.plain_ticks(axes.yaxis, inches)
    shown = [tick for tick in axes.get_yticks() if low <= tick <= low * ratio]
    assert 2 <= len(shown) <= max(5, inches / 0.16 + 1)
    assert len({axes.yaxis.get_major_formatter()(tick) for tick in shown}) == len(shown)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_without_rows_is_nothing_to_draw(name: str) -> None:
    """Of no run, and of one without rows, the message says what the picture needs."""
    for runs in ([], [msgspec.structs.replace(multiplied(), rows=())]):
        with pytest.raises(UserError, match=f"nothing to draw: {name} needs"):
            picture(name, runs)


def test_too_many_rows_are_no_picture() -> None:
    """More variants than anybody could read are refused with what to do about it."""
    many = [synthetic.variant(f"V{number}") for number in range(101)]
    run = synthetic.run([time_row(one, linear(), 1.0) for one in (BASE, *many)])
    with pytest.raises(
        UserError, match=r"102 variants or cases .*, 100 are the most: choose with --variants"
    ):
        picture("multipliers", [run])
    assert picture("multipliers", [run], Wish(variants=("V1?",))).axes


def test_a_whole_run_goes_before_a_newer_one_that_was_cut_off() -> None:
    """The newest run that is whole is drawn, a flawed one only where no other has the figures."""
    old = multiplied()
    new = synthetic.run(old.rows, run_id="20270101T000000Z-quick-0002")
    assert "20270101" in picture("multipliers", [old, new]).origin
    cut = msgspec.structs.replace(new, end=None)
    assert "20260101" in picture("multipliers", [old, cut]).origin
    assert "20270101" in picture("multipliers", [cut]).origin


def test_samples_are_of_a_run_that_has_all_who_were_asked_for() -> None:
    """A newer run with one of two variants does not take the place of one with both."""
    alone = synthetic.run([time_row(BASE, linear(), 1.0)], run_id="20270101T000000Z-quick-0002")
    assert "20260101" in picture("samples", [sampled(), alone]).origin
    assert "20270101" in picture("samples", [sampled(), alone], Wish(variants=("Base",))).origin


def test_choices_choose() -> None:
    """Operator, cases by label or shape, variants and number format narrow what is drawn; base stays."""
    rows = [time_row(one, case, 1.0) for case in (linear(), linear(512)) for one in (BASE, DENSE)]
    half = [msgspec.structs.replace(row.case, dtype="float16") for row in rows]
    rows += [msgspec.structs.replace(row, case=case) for row, case in zip(rows, half, strict=True)]
    run = synthetic.run(rows)
    sheet = picture(
        "multipliers", [run], Wish(cases="(512, 512)", variants=("PerturbedL*",), dtype="float16")
    )
    assert [text.get_text() for text in sheet.legends[0].get_texts()] == ["(512, 512)"]
    assert "float16" in sheet.origin
    assert "float32" in picture("multipliers", [run]).origin


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(operator="Conv9d"), "no operator matches 'Conv9d' in these runs; there are: Linear"),
        (Wish(dtype="int3"), "no dtype matches 'int3' in these runs; there are: float32"),
        (Wish(cases="nope"), "no case matches 'nope' in these runs; there are: Linear(256, 256)"),
        (Wish(variants=("nope",)), "no variant matches 'nope' in these runs; there are: Base, Naive"),
        (Wish(phase="update"), "nothing to draw with phase update: multipliers needs a run"),
        (Wish(metric="power_w"), "nothing to draw with metric power_w: multipliers needs a run"),
        (Wish(method="graph"), "nothing to draw with method graph: multipliers needs a run"),
    ],
)
def test_choices_that_match_nothing_say_what_there_is(wish: Wish, words: str) -> None:
    """The message names what was asked for and what the runs hold."""
    with pytest.raises(UserError) as raised:
        picture("multipliers", wish=wish)
    assert words in str(raised.value)


def test_a_choice_that_a_picture_does_not_take_is_refused() -> None:
    """Pictures with figures of their own say so where another phase or metric is asked for."""
    with pytest.raises(UserError, match="pareto shows figures of its own: leave --phase away"):
        picture("pareto", wish=Wish(phase="sample"))
    with pytest.raises(UserError, match="roofline shows figures of its own: leave --metric away"):
        picture("roofline", wish=Wish(metric="launches"))


def test_an_unknown_name_lists_the_known() -> None:
    """A picture that there is not is refused with those that there are."""
    with pytest.raises(UserError, match="no picture 'nope'; there are: pareto, multipliers, "):
        pictures.find("nope")


def test_history_is_of_what_was_asked_for() -> None:
    """Its cases can be chosen; where there is room for some panels alone the note says so."""
    assert picture("history", HISTORY, Wish(cases="(256*")).heading.startswith("Linear, forward")
    wish = Wish(paper=COLUMN)
    cases = [linear(256, members=members) for members in range(1, 12)]
    runs = []
    for run in HISTORY:
        rows = tuple(msgspec.structs.replace(row, case=case) for row in run.rows for case in cases)
        runs.append(msgspec.structs.replace(run, rows=rows))
    sheet = pictures.drawn(PICTURES["history"], Source(tuple(runs)), wish)
    assert sheet.notes == ["4 of 11 panels, those with change points first: choose with --cases"]
    assert sheet.get_figheight() < 12


def hold_inside(sheet: Sheet, paper: Paper) -> None:
    """Hold every text to be inside the paper, and panels to keep clear of the title and the foot."""
    words = list(placed(sheet))
    width, height = sheet.get_size_inches() * sheet.dpi
    assert sheet.get_size_inches()[0] == pytest.approx(paper.inches)
    for one in words:
        left, low, right, high = one.extent
        assert left >= -0.5, one
        assert low >= -0.5, one
        assert right <= width + 0.5, one
        assert high <= height + 0.5, one
    title = min(one.extent[1] for one in words if one.text == sheet.get_suptitle())
    foot = max(one.extent[3] for one in words if one.text == sheet.texts[-1].get_text())
    for axes in sheet.axes:
        box = axes.get_tightbbox()
        assert box is not None
        assert box.y1 <= title + 1
        assert box.y0 >= foot - 1


def series(axes: Axes) -> list[tuple[tuple[str, bool, str], float]]:
    """The marked series of a panel: mark, whether it is filled, and line; and how light it is."""
    found = []
    for line in axes.lines:
        shape = str(line.get_marker())
        if shape in {"None", "none", "x", ""} or line.get_fillstyle() == "none":
            continue
        filled = to_rgb(line.get_markerfacecolor()) != (1.0, 1.0, 1.0)
        look = (shape, filled, str(line.get_linestyle())), luminance(line.get_color())
        if look not in found:
            found.append(look)
    return found


def luminance(color: ColorType) -> float:
    """How light a colour is, from 0 to 1, as a grey picture has it."""
    red, green, blue = to_rgb(color)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def spoilt(run: Run, samples: tuple[tuple[float, ...], ...]) -> Run:
    """The run in which no variant but base has usable samples."""
    rows = tuple(
        msgspec.structs.replace(row, samples=tuple(tuple(abs(x) for x in visit) for visit in samples))
        if hasattr(row, "samples") and row.variant != BASE
        else row
        for row in run.rows
    )
    return msgspec.structs.replace(run, rows=rows)
