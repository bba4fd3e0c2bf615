"""Numbers beside marks."""

import math
import random

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text

from esbench.report.numbering import Mark, Place, number


def numbered(marks: list[Mark], count: int) -> Axes:
    """A panel of 3 by 2 inches on logarithmic axes, of which the first marks are numbered."""
    axes = Figure(figsize=(3, 2)).add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xscale="log", yscale="log", xlim=(1, 1000), ylim=(1, 1000))
    number(axes, marks, marks[:count])
    return axes


def placed(axes: Axes) -> list[tuple[Annotation, Place]]:
    """The numbers, each with its middle in pixels."""
    figure = axes.get_figure(root=True)
    assert figure
    figure.draw_without_rendering()
    found = []
    for text in axes.texts:
        assert isinstance(text, Annotation)
        box = Text.get_window_extent(text)  # an annotation's own has its line too
        found.append((text, ((box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2)))
    return found


def cluster(seed: int, count: int = 12, wide: float = 0.35) -> list[Mark]:
    """Marks near each other, in powers of ten."""
    draw = random.Random(seed)  # noqa: S311  # no secret
    ends = [(draw.uniform(1, 1 + wide), draw.uniform(1, 1 + wide)) for _ in range(count)]
    return [Mark(10**x, 10**y, 4.5) for x, y in ends]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("wide", [0.05, 0.35, 1.5])
def test_the_nearest_mark_of_a_number_is_its_own(seed: int, wide: float) -> None:
    """However near marks are to each other; where that cannot be, a line leads to its mark."""
    marks = cluster(seed, wide=wide)
    axes = numbered(marks, 5)
    middles = []
    for mark, (text, middle) in zip(marks, placed(axes), strict=False):
        places = {one: math.dist(middle, axes.transData.transform(one[:2])) for one in marks}
        if text.arrow_patch is None:
            assert min(places, key=places.__getitem__) == mark
        else:
            assert text.xy == mark[:2]
        middles.append(middle)
    apart = [math.dist(a, b) for place, a in enumerate(middles) for b in middles[:place]]
    assert min(apart) > 8 * 100 / 72


def test_marks_with_room_need_no_line() -> None:
    """A number stands over its mark where nothing else does; those of equal marks have lines."""
    marks = [Mark(10.0, 10.0, 4.5), Mark(100.0, 100.0, 9.0)]
    assert [text.arrow_patch for text, _ in placed(numbered(marks, 2))] == [None, None]
    same = [text.arrow_patch is None for text, _ in placed(numbered([marks[0]] * 2, 2))]
    assert same == [False, False]


def test_a_number_stays_in_its_panel() -> None:
    """A mark in a corner has its number where there is room."""
    for corner in ((1.02, 990.0), (1.02, 1.02), (990.0, 990.0), (990.0, 1.02)):
        ((_, middle),) = placed(numbered([Mark(*corner, 4.5)], 1))
        assert 0 < middle[0] < 300
        assert 0 < middle[1] < 200
