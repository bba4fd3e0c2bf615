"""The page, the tables and the plot of suite peers, from invented runs."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from esbench.errors import UserError
from esbench.report.analysis.peers import OPERATOR, Generations, name
from esbench.report.plots.peers import generation_times
from esbench.report.readme import Page
from esbench.report.tables.peers import peer_sections, summary
from esbench.schema import QUALITY, Case, Measurement, Row, Run, Variant
from esbench.studies.peers import render
from tests import synthetic
from tests.report.report_cases import a_run, store
from tests.synthetic import time_row, variant

OURS = Variant(scheme="Esbench", options=(("scheme", "LowRank"),))
EVOTORCH = variant("EvoTorch", version="0.6.1")
COMPILED = variant("Evox", version="1.4.0", compiled=True)
SCAN = variant("Evosax", version="0.3.2", generations=5)
BASE = Variant(scheme="Backpropagation", mode="base", baseline=True)
TIMES = {OURS: 1.0, EVOTORCH: 3.0, COMPILED: 2.0, SCAN: 4.0, BASE: 0.5}


def case(pairs: int) -> Case:
    """Return a case of this many antithetic pairs."""
    return Case(
        operator=OPERATOR, out_channels=64, in_channels=64, members=pairs, repeats=64, antithetic=True
    )


def small_cnn() -> Case:
    """Return a case of a CNN."""
    return msgspec.structs.replace(case(32), operator="GenerationCNN", out_channels=8)


def quality(of: Variant, at: Case, metric: str, method: str, value: float) -> Measurement:
    """Return a metric that is measured once."""
    return Measurement(variant=of, case=at, phase=QUALITY, metric=metric, method=method, samples=((value,),))


def peers_run() -> Run:
    """Return three populations; a scan has no number at the largest, and EvoTorch did not learn."""
    rows: list[Row] = []
    for pairs in (32, 128, 1024):
        here = case(pairs)
        for timed, ms in TIMES.items():
            if timed == SCAN and pairs > 128:
                rows.append(synthetic.skipped(timed, here, "a scan saves the start of a call"))
                continue
            count = 5 if timed == SCAN else 1
            times = (ms * pairs / 32 * count * factor for factor in (0.99, 1.0, 1.01))
            rows.append(time_row(timed, here, *times, phase="step"))
            rows.append(quality(timed, here, "n_eff_count", "quality law", pairs))
    for timed in (OURS, COMPILED):
        rows.append(quality(timed, case(128), "loss", "start", 2.36))
        rows.append(quality(timed, case(128), "loss", "200 generations", 0.27))
        rows.append(quality(timed, case(1024), "process_peak_bytes", "fresh process", 20e6))
    rows.append(time_row(OURS, small_cnn(), 3.0, 3.0, 3.0, phase="step"))
    rows.append(quality(OURS, small_cnn(), "n_eff_count", "quality law", 32))
    reason = "wrong result: it does not learn: the loss is 2.36 at the start and 7.72 after 200 generations"
    rows.append(synthetic.failed(EVOTORCH, case(128), reason, QUALITY))
    return synthetic.run(rows, suite="peers", run_id="20270101T000000Z-peers-0001")


def test_each_library_has_a_row_with_its_fastest_variant() -> None:
    """The summary has times over the population, the multiple of the first row, n_eff, memory and loss."""
    section = summary(peers_run())
    assert section is not None
    table = section.blocks[0].table
    rows = dict(zip(table.labels, table.texts(), strict=True))
    assert [*rows] == [
        "esbench LowRank",
        "EvoX 1.4.0, compiled=True",
        "EvoTorch 0.6.1",
        "evosax 0.3.2, generations=5",
    ]
    assert table.headings[:4] == ("64 (ms)", "256 (ms)", "2,048 (ms)", "x first row at 256")
    assert rows["esbench LowRank"] == ["1.00", "4.00", "32.0", "1.00x", "32.0", "20.0", "0.270"]
    assert rows["EvoX 1.4.0, compiled=True"][1:5] == ["8.00", "64.0", "2.00x", "16.0"]
    assert rows["EvoTorch 0.6.1"][-1] == "failed [1]"
    assert [note[:26] for note in section.footnotes] == [
        "[1] failed: wrong result: ",
        "[2] unavailable: a scan sa",
    ]
    assert rows["evosax 0.3.2, generations=5"][1] == "16.0"  # of one generation
    assert summary(synthetic.run(synthetic.three(synthetic.linear()))) is None


def test_tables_name_the_fastest_and_every_reason() -> None:
    """A row names the fastest search of each case; a variant without a number has its reason below."""
    section, of_cnn = peer_sections(peers_run())
    text = section.markdown()
    assert "| fastest | esbench LowRank | esbench LowRank | esbench LowRank |" in text
    assert "64 x 32, 64 units" in text
    assert "unavailable: a scan saves the start of a call" in text
    assert "it does not learn: the loss is 2.36 at the start and 7.72 after 200 generations" in text
    assert "Multiple of esbench LowRank" in text
    assert (section.title, of_cnn.title) == ("A generation of an MLP", "A generation of a CNN")
    assert "64 x 32, 8 channels" in of_cnn.markdown()
    assert "loss" in text
    assert "loss" not in of_cnn.markdown()  # it is compared on the MLP


def test_a_peer_that_wins_is_named() -> None:
    """Where another library is faster, it is the fastest, and its multiple of esbench is below 1."""
    run = peers_run()
    rows = [
        time_row(row.variant, row.case, 0.5, 0.5, 0.5, phase="step")
        if isinstance(row, Measurement) and (row.variant, row.case, row.phase) == (COMPILED, case(32), "step")
        else row
        for row in run.rows
    ]
    section, _ = peer_sections(msgspec.structs.replace(run, rows=tuple(rows)))
    text = section.markdown()
    assert "| fastest | EvoX 1.4.0, compiled=True | esbench LowRank |" in text
    assert "| EvoX 1.4.0, compiled=True | 0.500x | 2.00x | 2.00x |" in text


def test_the_page_has_the_plot_and_the_tables_of_each_device(tmp_path: Path) -> None:
    """Only runs of the suite are shown; the plot's title is the finding."""
    assert render(tmp_path, [synthetic.run(synthetic.three(synthetic.linear()))]) == []
    page, plot = render(tmp_path, [peers_run()])
    assert plot.name == "peers-test-cpu.svg"
    finding = "A generation of 2,048 evaluations takes esbench LowRank 32.0 ms, the others 2.00x to 3.00x"
    text = page.read_text(encoding="utf-8")
    assert f"![{finding}](peers-test-cpu.svg)" in text or finding in text
    assert "## Test CPU" in text


def test_the_plot_has_a_line_for_each_library() -> None:
    """A line ends where its variant has no number; fewer than three populations are not drawn."""
    generations = Generations.of(peers_run())
    assert generations is not None
    figure = generation_times(generations)
    assert figure is not None
    lines = {tuple(np.asarray(line.get_xdata())) for line in figure.axes[0].lines}
    assert (64, 256, 2048) in lines
    assert (64, 256) in lines
    small = msgspec.structs.replace(
        peers_run(), rows=tuple(row for row in peers_run().rows if row.case != case(32))
    )
    few = Generations.of(small)
    assert few is not None
    assert generation_times(few) is None


def test_a_generation_that_was_measured_once_says_so() -> None:
    """Its time has a footnote, and its multiple is one of medians, as no rounds are shared."""
    run, once = peers_run(), "one sample: a call takes longer than the budget of 0.2 s"
    rows = [
        msgspec.structs.replace(row, samples=row.samples[:1], stop=once)
        if isinstance(row, Measurement)
        and (row.variant, row.case, row.phase) == (COMPILED, case(1024), "step")
        else row
        for row in run.rows
    ]
    run = msgspec.structs.replace(run, rows=tuple(rows))
    section = summary(run)
    assert section is not None
    times = dict(zip(section.blocks[0].table.labels, section.blocks[0].table.texts(), strict=True))
    assert times["EvoX 1.4.0, compiled=True"][2] == f"63.4 [{section.footnotes.index(f'[1] {once}') + 1}]"
    assert "inside rounds where the rows share them, of medians elsewhere" in peer_sections(run)[0].markdown()


def test_a_name_has_the_version_of_the_library() -> None:
    """Other options follow, and an unknown variant keeps its own name."""
    assert name(EVOTORCH) == "EvoTorch 0.6.1"
    assert name(OURS) == "esbench LowRank"
    assert name(variant("VmapByHand", chunk_size=256)) == "torch.func.vmap, chunk_size=256"
    assert name(variant("Mine")) == "Mine"


def test_generations_beside_other_libraries(tmp_path: Path) -> None:
    """A page has the fastest variant of each library, and all tables; another run is an error."""
    page, file = Page(tmp_path), store(tmp_path, peers_run())
    assert "| esbench LowRank | 1.00 | 4.00 | 32.0 | 1.00x | 32.0 | 20.0 | 0.270 |" in page.peers(file)
    assert "[2] unavailable: a scan saves the start of a call" in page.peers(file)
    assert "| fastest | esbench LowRank |" in page.generations(file)
    with pytest.raises(UserError, match="has no generations: name a run of suite peers"):
        page.peers(store(tmp_path, a_run()))
