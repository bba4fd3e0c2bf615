"""Words in pictures, measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.report.lettering import fit, fit_all, inches, printable, wrap

WORDS = st.text(st.characters(min_codepoint=32, max_codepoint=0x17F), max_size=60)


def test_a_text_that_has_room_stays() -> None:
    """Nothing is cut that fits."""
    assert fit("Permuted(side=out)", 3.0, 6.0) == "Permuted(side=out)"


def test_the_middle_of_a_long_name_gives_way() -> None:
    """Its beginning and its end, which tells it from others, stay."""
    cut = fit("PermutedConv2d(side=out, out_sparsity=0.125)", 1.2, 6.0)
    head, _, tail = cut.partition("…")
    assert cut.startswith("Permuted")
    assert cut.endswith("0.125)")
    assert len(head) > 4 < len(tail)


@given(WORDS, st.floats(0.3, 2))
def test_a_cut_text_has_room(text: str, room: float) -> None:
    """Whatever is cut is no wider than asked for, and as long as it can be."""
    cut = fit(text, room, 6.0)
    assert inches(cut, 6.0) <= room
    if cut != printable(text):
        assert inches(cut, 6.0) > room - 0.3


def test_names_that_differ_stay_apart() -> None:
    """Two names that differ in nothing but what was cut out get numbers; a name that comes twice, one."""
    names = [f"Scheme({'a' * 40}{middle}{'b' * 40})" for middle in ("1", "2", "1")]
    one, two, again = fit_all(names, 1.5, 6.0)
    assert (one[-4:], two[-4:]) == (" [1]", " [2]")
    assert one == again != two
    assert all(inches(name, 6.0) <= 1.5 for name in (one, two))


def test_lines_are_no_wider_than_the_paper() -> None:
    """A text is broken between words, a word without end is cut, and an ellipsis says that more is left."""
    lines = wrap("one two three " * 20, 1.5, 6.0)
    assert " ".join(lines).split() == ["one", "two", "three"] * 20
    assert all(inches(line, 6.0) <= 1.5 for line in lines)
    few = wrap(f"{'x' * 300} " * 9, 1.5, 6.0, most=2)
    assert len(few) == 2
    assert few[-1].endswith("…")
    assert all(inches(line, 6.0) <= 1.5 for line in few)
    assert wrap("one", 1.5, 6.0, most=1) == ["one"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\tc", "a b c"),
        ("50 % of $x$", "50 % of $x$"),
        ("\N{ROCKET} go", "\ufffd go"),
        ("\u4e2d\u6587", "\ufffd\ufffd"),
        ("κ ≥ 1 ± 2", "κ ≥ 1 ± 2"),
        ("", ""),
    ],
)
def test_what_no_font_here_has_is_marked(text: str, shown: str) -> None:
    """A line stays one line, and a character without a glyph becomes a mark: no warning, no empty box."""
    assert printable(text) == shown
