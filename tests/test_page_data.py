"""The data in the page: every figure can be traced to its samples, and nothing in it can leave its place."""

import json
import math
import random
from pathlib import Path

import msgspec
import pytest

from esbench.report.page import choice
from esbench.report.page.embedding import Embedding
from esbench.report.page.numbers import dumped, exactly, rounded
from esbench.report.page.rendering import page, render_page
from esbench.store import read_run
from esbench.units import format_number
from tests import synthetic
from tests.page_cases import (
    ALERT,
    EVIL,
    KNOWN,
    NEW,
    OLD,
    embedded,
    evil,
    figures,
    many,
    parsed,
    usual,
    written,
)
from tests.raw_rows import Raw, RawRows
from tests.report_cases import ROOT

TRACED = [
    "results/amd-epyc/20261122T151454Z-quick-c095.jsonl.gz",
    "results/amd-epyc/20261121T170813Z-width-fab1.jsonl.gz",
]
SAMPLED = 50
LIMIT = 2_000_000


@pytest.fixture(scope="module")
def measured() -> Raw:
    """The data of a page on committed runs."""
    runs = [run for name in TRACED if (run := read_run(ROOT / name)[0])]
    return embedded(page(runs, {}))


def test_fifty_figures_are_those_of_their_samples(measured: Raw) -> None:
    """Figures drawn at random are what the raw samples of the run and row that they name come to."""
    files = {Path(name).name.split(".")[0]: RawRows.of(ROOT / name) for name in TRACED}
    told = [
        (run, quantity, case, name, column, cells)
        for run, quantity, case, name, cells in figures(measured)
        for column in ("m", "l", "h", "s", "t", "e")
        if cells.get(column) is not None and not cells.get("k")
        if not (quantity["phase"] == "quality" and column != "m")
        if not (quantity["metric"] == "n_eff_per_ms" and column not in {"m", "e"})
    ]
    checked = 0
    for run, quantity, case, name, column, cells in random.Random(7).sample(told, 4 * SAMPLED):  # noqa: S311  no secret
        expected = files[run["id"]].figure(quantity, case["label"], name, column)
        if expected is None:
            continue
        found, low, high = cells[column], cells.get("l"), cells.get("h")
        # Rounding moves a figure by 5 % of half its interval at most, or by half a unit of its third digit.
        allowed = max(0.05 * ((high or 0) - (low or 0)) / 2, 5.01e-3 * abs(expected))
        assert found == pytest.approx(expected, abs=allowed), (quantity, case, name, column)
        checked += 1
    assert checked >= SAMPLED


def test_a_figure_of_another_row_is_found_out(measured: Raw) -> None:
    """The samples of another variant do not come to a figure, so the trace means something."""
    rows = RawRows.of(ROOT / TRACED[0])
    quantity = next(one for one in measured["quantities"] if one["metric"] == "latency_ns")
    cells = {
        name: (case, cells["m"])
        for run, one, case, name, cells in figures(measured)
        if one == quantity and run["id"] in TRACED[0] and name in {"Perturbed", "LowRank(rank=1)"}
    }
    (case, dense), (_, thin) = cells["Perturbed"], cells["LowRank(rank=1)"]
    assert rows.figure(quantity, case["label"], "Perturbed", "m") == pytest.approx(dense, rel=5e-3)
    assert rows.figure(quantity, case["label"], "Perturbed", "m") != pytest.approx(thin, rel=5e-3)


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [
        ((11.62543, 11.5123, 11.7345), [11.63, 11.51, 11.73]),
        ((11.62543, None, None), [11.63, None, None]),
        ((123456.0, 123000.0, 124000.0), [123460, 123000, 124000]),
        ((0.00123456, 0.0012, 0.0013), [0.001235, 0.0012, 0.0013]),
        ((5.0, 5.0, 5.0), [5, 5, 5]),
        ((math.inf, 1.0, math.inf), [None, 1, None]),
        ((math.nan, None, None), [None, None, None]),
        ((0.0, -0.011, 0.012), [0, -0.011, 0.012]),
    ],
)
def test_digits_are_those_that_an_interval_supports(
    numbers: tuple[float | None, ...], shown: list[float | None]
) -> None:
    """A number keeps two digits of half its interval; what is no finite number is none."""
    assert rounded(*numbers) == shown


def test_what_is_embedded_is_written_as_the_number_itself() -> None:
    """However a number is rounded for the page, its text there is that of the tables, not rounded twice."""
    draw = random.Random(9)  # noqa: S311  # no secret
    for _ in range(3000):
        value = draw.choice([-1, 1, 1]) * 10.0 ** draw.uniform(-7, 9)
        half = abs(value) * 10.0 ** draw.uniform(-7, 1)
        low, high = value - half * draw.random(), value + half
        found, *ends = rounded(value, low, high)
        known = [one for one in ends if one is not None]
        assert found is not None
        assert format_number(found, max(abs(one - found) for one in known)) == format_number(value, half)
        assert format_number(rounded(value)[0]) == format_number(value)
        assert format_number(exactly(value)) == format_number(value)
    assert rounded(11.6496, 11.35, 11.95)[0] != 11.65  # with one decimal it would be 11.7


def test_samples_are_not_in_the_page() -> None:
    """A run with a thousand more samples makes the page no longer."""
    short = usual()
    first = short.measurements[-1]
    longer = msgspec.structs.replace(first, samples=tuple((2e6,) for _ in range(1000)))
    rows = tuple(longer if row is first else row for row in short.rows)
    assert abs(len(written([msgspec.structs.replace(short, rows=rows)])) - len(written([short]))) < 100


def test_what_names_carry_stays_text() -> None:
    """Markup in any name, reason or label is in the data as text, and no tag of the page is theirs."""
    text = written([evil(), usual()])
    names = {one["scheme"] for one in embedded(text)["variants"]}
    assert any(ALERT in name for name in names)
    assert any(ALERT in reason for reason in embedded(text)["texts"])
    plain = parsed(written([usual()]))
    assert parsed(text).tags == plain.tags or len(parsed(text).tags) == len(plain.tags)
    assert "onerror=" not in {name for _, attributes in parsed(text).tags for name in attributes}
    assert ALERT not in text
    assert "\u2028" not in text


def test_json_in_a_script_ends_no_script() -> None:
    """What could end a script or a line of JavaScript is escaped, and comes back unchanged."""
    text = dumped({"a": [EVIL, "<!--", "&amp;", "\u2029"]})
    assert not set("<>&'") & set(text)
    assert text.isascii()
    assert json.loads(text) == {"a": [EVIL, "<!--", "&amp;", "\u2029"]}


def test_the_page_asks_for_nothing() -> None:
    """No address of another file is in the page, and its policy forbids what is not in it."""
    page = parsed(written([usual()]))
    wanted = {"src", "href", "data", "srcset", "action", "poster"}
    assert {attributes[name] for _, attributes in page.tags for name in wanted & attributes.keys()} == {
        "#main"
    }
    (policy,) = [one["content"] for tag, one in page.tags if one.get("http-equiv")]
    assert str(policy).startswith("default-src 'none'; style-src 'sha256-")
    assert "http" not in written([usual()]).replace("http-equiv", "")


def test_cells_without_a_number_have_their_reason() -> None:
    """A cell that is skipped, or that holds no sample, carries why; an overflow is no number."""
    found = {name: cells for _, _, _, name, cells in figures(embedded(written([evil()])))}
    texts = embedded(written([evil()]))["texts"]
    assert texts[found["Reasoned"]["r"]].startswith("unavailable: </script>")
    assert "without any" in texts[found["Empty"]["r"]]
    data = embedded(written([usual()]))
    (reason,) = [
        data["texts"][cells["r"]]
        for _, quantity, case, name, cells in figures(data)
        if (name, case["label"], quantity["metric"]) == ("Hadamard", "Linear(512, 512)", "latency_ns")
    ]
    assert reason == "unavailable: out of memory: 9 GB"


def test_a_long_text_is_cut() -> None:
    """A reason of a megabyte does not make a page of one."""
    row = synthetic.skipped(synthetic.DENSE, synthetic.linear(), "x" * 10**6)
    run = synthetic.run([*synthetic.three(synthetic.linear(512)), row])
    assert len(written([run])) - len(written([usual()])) < 10_000


def test_few_runs_are_whole() -> None:
    """Where there is room for all, older runs have all of their figures, and no rule is needed."""
    data = embedded(written([usual(OLD), usual(NEW)]))
    assert [(run["id"], run["thinned"]) for run in data["runs"]] == [(NEW, False), (OLD, False)]
    assert data["contents"] == "2 of 2 runs are in this page."
    assert data["rule"] == ""


def test_many_runs_are_thinned() -> None:
    """Of 10,000 runs the newest is whole, older ones are thinned or left out, and the page says which."""
    text = written(many(10_000))
    assert len(text.encode()) < LIMIT / 2
    data = embedded(text)
    newest, *older = data["runs"]
    assert newest["id"] == "20269999T0-quick"
    assert not newest["thinned"]
    assert all(run["thinned"] for run in older)
    assert [run["id"] for run in older] == sorted((run["id"] for run in older), reverse=True)
    held = len(data["runs"])
    assert 100 < held < 10_000
    assert data["contents"] == (
        f"{held} of 10,000 runs are in this page, {held - 1} of them thinned; {10_000 - held:,} had no room."
    )
    assert data["rule"] == choice.RULE
    metrics = {one["metric"] for run, one, *_ in figures(data) if run["thinned"]}
    assert metrics == {"latency_ns", "peak_bytes", "n_eff_per_ms"}


def test_many_suites_have_no_more_room() -> None:
    """Where every run is the newest of its suite, the newest of all are whole, and the page stays small."""
    one = usual()
    runs = [
        msgspec.structs.replace(
            one, header=msgspec.structs.replace(one.header, run_id=f"{20260000 + n}", suite=f"suite {n}")
        )
        for n in range(600)
    ]
    text = written(runs)
    data = embedded(text)
    assert LIMIT / 2 < len(text.encode()) < LIMIT
    assert [run["suite"] for run in data["runs"]][:2] == ["suite 599", "suite 598"]
    assert not data["runs"][0]["thinned"]
    assert "had no room" in data["contents"]


def test_a_run_without_room_leaves_nothing_behind() -> None:
    """What a run that does not fit would have brought is not in the page."""
    size = Embedding(KNOWN).add(usual(), room=10**9)
    assert size
    found = choice.contents([evil(), usual()], KNOWN, room=size + 2100)
    assert [run["suite"] for run in found.embedding.runs] == ["quick"]
    assert ALERT not in json.dumps(found.embedding.data())
    assert found.left_out == 1


def test_runs_of_any_age_and_kind_are_shown_together() -> None:
    """Several devices, types and schema versions are in one page; a run without a row is counted."""
    other = usual(OLD, device_name="GPU 1")
    header = msgspec.structs.replace(other.header, schema=1)
    wide = synthetic.run(synthetic.three(synthetic.linear(dtype="bfloat16")), suite="wide")
    empty = msgspec.structs.replace(usual(OLD), rows=())
    data = embedded(written([usual(), msgspec.structs.replace(other, header=header), wide, empty]))
    assert {one["device_name"] for one in data["environments"]} == {"Test CPU", "GPU 1"}
    assert {one["dtype"] for one in data["cases"]} == {"float32", "bfloat16"}
    assert data["contents"] == "3 of 4 runs are in this page; 1 hold no row."


def test_no_page_of_nothing(tmp_path: Path) -> None:
    """Without a row there is no page."""
    assert render_page([], tmp_path, tmp_path) == []
    assert render_page([synthetic.run([])], tmp_path, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changed_is_known() -> None:
    """A variant whose source is no longer what the run measured is told so; one of the same source is not."""
    for digest, changed in (("0" * 12, 0), ("1" * 12, 1)):
        run = usual()
        header = msgspec.structs.replace(run.header, code={"LowRank(rank=1)": digest})
        data = embedded(written([msgspec.structs.replace(run, header=header)]))
        assert len(data["runs"][0]["changed"]) == changed
