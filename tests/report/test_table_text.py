"""Tables as text: in Markdown and on the terminal."""

from typing import TYPE_CHECKING

import msgspec
import pytest

from esbench.report.site import console_tables
from esbench.report.tables.measured import time_sections
from esbench.report.text import escape
from tests import synthetic
from tests.report.table_cases import SMALL, forward
from tests.synthetic import DENSE, bytes_row, three, time_row, variant

if TYPE_CHECKING:
    from esbench.schema import Row


def test_markdown_cannot_be_broken_by_a_label() -> None:
    """Bars, line breaks and tags in labels and reasons stay inside their cell."""
    odd = variant("Odd", note="a|b\nc<d>")
    text = forward(*three(SMALL), time_row(odd, SMALL, 1.0, 2.0)).markdown()
    (row,) = [line for line in text.splitlines() if line.startswith("| Odd") and "1.50" in line]
    assert "a\\|b c\\<d\\>" in row
    tables = [line.replace("\\|", "") for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {3}


@pytest.mark.parametrize(
    ("words", "source"),
    [
        ("[a](https://b.c)", "\\[a\\](https\\://b.c)"),
        ("![a](a.png)", "\\!\\[a\\](a.png)"),
        ("<img src=a>", "\\<img src=a\\>"),
        ("a [1] [1](b) [1][2] [1]: c", "a [1] \\[1\\](b) \\[1\\][2] \\[1\\]: c"),
        ("[a [1]](b)", "\\[a [1]\\](b)"),
        ("# a", "\\# a"),
        ("> a", "\\> a"),
        ("_a_ **b** ~~c~~ `d`", "\\_a\\_ \\*\\*b\\*\\* \\~\\~c\\~\\~ \\`d\\`"),
        ("www.a.b c@d.e", "www\\.a.b c\\@d.e"),
        ("Permuted(side=out, in_sparsity=0.5): x", "Permuted(side=out, in_sparsity=0.5): x"),
        ("a\nb\x00c\x1b[1m\u202ed", "a b c \\[1m d"),
    ],
)
def test_words_of_a_foreign_run_are_not_live(words: str, source: str) -> None:
    """Links, pictures, tags, headings and emphasis in a name stay words; the rest stays readable."""
    assert escape(words) == source
    odd = msgspec.structs.replace(SMALL, operator=words)
    (section,) = time_sections(synthetic.run([time_row(DENSE, odd, 1.0)]), words)
    assert section.markdown().startswith(f"### {source}, forward: time\n")
    assert "\x1b" not in section.text()


def test_numbers_are_aligned_right() -> None:
    """Columns of numbers are right-aligned, and numbers are printed as they were formatted."""
    text = forward(*three(SMALL)).markdown()
    rules = {line for line in text.splitlines() if line.startswith("| :-")}
    assert rules == {"| :- | -: |"}


def test_console_has_every_table_once() -> None:
    """The terminal shows forward, other phases, peak memory and energy of an operator, the origin once."""
    conv = synthetic.conv2d()
    rows: list[Row] = [*three(SMALL), *three(conv), time_row(DENSE, SMALL, 1.0, phase="sample")]
    rows += [bytes_row(DENSE, SMALL, metric, 10) for metric in ("peak_bytes", "reserved_bytes", "energy_j")]
    text = console_tables(synthetic.run(rows))
    titles = [
        line.partition(" (")[0] for line in text.splitlines() if line.startswith(("Linear,", "Conv2d,"))
    ]
    assert titles == [
        "Linear, forward: time",
        "Linear, sample: time",
        "Linear, forward: peak memory",
        "Linear, forward: energy of one call",
        "Conv2d, forward: time",
    ]
    assert text.count("commit 0123456") == 1
