"""The tables of a run: their blocks, rows, columns and cells."""

from typing import Literal

import msgspec
import pytest

from esbench.registry import REGISTRY, load
from esbench.report.analysis.pivot import grids, headings, operators
from esbench.report.site import all_sections
from esbench.report.tables.measured import memory_sections, other_sections, other_time_sections, time_sections
from esbench.schema import Case, Row, Variant
from tests import synthetic
from tests.report.table_cases import LARGE, SMALL, SPARSE, forward, frames
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, three, time_row


def test_three_blocks_of_nesgpu() -> None:
    """A forward has times, speed against naive and time against base, each for every row and shape."""
    found = frames(forward(*three(SMALL), *three(LARGE)))
    assert list(found) == ["Time (ms)", "Speed multiplier vs. naive", "Time multiplier vs. base"]
    times, speeds, multiples = found.values()
    assert list(times.columns) == ["(256, 256)", "(512, 512)"]
    assert list(times.index) == ["PerturbedLinear", "Base", "Naive"]
    assert list(times["(256, 256)"]) == ["22.0", "5.50", "550"]
    assert list(speeds["(256, 256)"]) == ["25.0x", "100x", "1.00x"]
    assert list(multiples["(256, 256)"]) == ["4.00x", "1.00x", "100x"]


def test_ratios_are_taken_inside_rounds_and_said() -> None:
    """A multiplier is a median of ratios inside rounds, and the block says which kind it is."""
    rows = [time_row(BASE, SMALL, 1, 10, 100), time_row(DENSE, SMALL, 3, 30, 200)]
    assert frames(forward(*rows))["Time multiplier vs. base"].loc["PerturbedLinear", "(256, 256)"] == "3.00x"
    assert "ratios inside rounds" in forward(*rows).text()
    apart = [rows[0], time_row(DENSE, SMALL, 3, 30, 200, group=1)]
    assert "ratios of medians" in forward(*apart).text()
    both = [*rows, time_row(SPARSE, SMALL, 1, group=1)]
    assert "of medians elsewhere" in forward(*both).text()


def test_multiplier_is_taken_in_its_own_company() -> None:
    """Where memory splits a case into companies, each row is compared with the base beside it."""
    rows = [
        time_row(BASE, SMALL, 1, 1),
        time_row(DENSE, SMALL, 3, 3),
        time_row(BASE, SMALL, 2, 2, group=1),
        time_row(SPARSE, SMALL, 4, 4, group=1),
    ]
    section = forward(*rows)
    assert list(section.blocks[0].frame["(256, 256)"]) == ["3.00", "4.00", "1.00"]
    assert list(section.blocks[1].frame["(256, 256)"]) == ["3.00x", "2.00x", "1.00x"]
    assert "ratios inside rounds;" in section.text()


def test_baselines_come_last_in_nesgpus_order() -> None:
    """Rows keep the order of the run, and Base, Naive, Loop and Vmap stand at the end."""
    others = [Variant(scheme=name, baseline=True) for name in ("Vmap", "Loop")]
    rows = [time_row(v, SMALL, 1.0) for v in (*others, NAIVE, SPARSE, BASE, DENSE)]
    labels = list(forward(*rows).blocks[0].frame.index)
    assert labels == ["SparsePerturbedLinear(k=2)", "PerturbedLinear", "Base", "Naive", "Loop", "Vmap"]


def test_columns_are_in_nesgpus_order_whatever_the_runs() -> None:
    """A run measures its cases in a random order; columns go from large kernels and narrow to wide."""
    load("impls")
    planned = REGISTRY.find_suite("readme").cases
    rows = [time_row(BASE, case, 1.0) for case in sorted(planned, key=lambda case: case.label[::-1])]
    measured = synthetic.run(rows)
    assert operators(measured) == ["Linear", "Conv2d"]
    for operator in operators(measured):
        (section,) = time_sections(measured, operator, "forward")
        assert list(section.blocks[0].frame.columns) == [c.shape for c in planned if c.operator == operator]


def test_skipped_row_shows_its_reason() -> None:
    """A cell without a number says why in short, and in full under the table, in every block."""
    reason = "out of memory: needs 12.5 GB, 2.1 GB are free | give fewer members\nor another machine"
    section = forward(*three(SMALL), time_row(BASE, LARGE, 1.0), skipped(DENSE, LARGE, reason))
    for block in section.blocks:
        assert block.frame.loc["PerturbedLinear", "(512, 512)"] == "out of memory [1]"
    assert section.footnotes[-1] == f"[1] unavailable: {reason}"
    text = section.markdown()
    assert "[1] unavailable: out of memory: needs 12.5 GB, 2.1 GB are free \\| give fewer members or" in text


def test_population_that_fits_stands_beside_the_reason() -> None:
    """Out of memory, a cell says how many members do fit, or how many at least if the search was cut."""
    row = bytes_row(DENSE, LARGE, "largest_members", 768)
    for stop, words in (("resolution", "768 fit"), ("budget", "at least 768 fit")):
        found = msgspec.structs.replace(row, method="bisection", stop=stop)
        section = forward(
            *three(SMALL), time_row(BASE, LARGE, 1.0), skipped(DENSE, LARGE, "out of memory"), found
        )
        shown = section.blocks[0].frame.loc["PerturbedLinear", "(512, 512)"]
        assert shown == f"out of memory, {words} [1]"


def test_failed_variant_has_no_number() -> None:
    """A variant that failed its oracle shows no time, even where one was measured."""
    row = msgspec.structs.replace(skipped(DENSE, SMALL, "forward is off by 3"), status="failed")
    section = forward(*three(SMALL), row)
    assert list(section.blocks[0].frame.loc["PerturbedLinear"]) == ["failed [1]"]
    assert section.footnotes == ("[1] failed: forward is off by 3",)


def test_long_reason_is_cut_in_the_cell_only() -> None:
    """A reason without a short first clause is cut in its cell and whole in its footnote."""
    reason = "the permutation of this many channels does not fit the index type"
    section = forward(*three(SMALL), skipped(SPARSE, SMALL, reason))
    assert (
        section.blocks[0].frame.loc["SparsePerturbedLinear(k=2)", "(256, 256)"]
        == "the permutation of this man… [1]"
    )
    assert reason in section.markdown()


def test_absent_cell_and_absent_reference_are_said() -> None:
    """A cell that was never visited is a dash with a note; one without a base to compare with says so."""
    section = forward(*three(SMALL), time_row(DENSE, LARGE, 1.0))
    times, speeds, multiples = (block.frame.loc[:, "(512, 512)"] for block in section.blocks)
    assert times["Base"] == "-"
    assert "-: not in this run" in section.footnotes
    assert (speeds["PerturbedLinear"], multiples["PerturbedLinear"]) == ("no naive", "no base")


def test_unusable_samples_are_not_a_number() -> None:
    """Samples of a foreign file that have no median show as no number, never as 0 or NaN."""
    empty = msgspec.structs.replace(time_row(SPARSE, linear(1024)), samples=((), ()))
    rows = [time_row(SPARSE, SMALL, float("nan"), 1.0), time_row(SPARSE, LARGE), empty]
    section = forward(*three(SMALL), *rows)
    none = "no samples [1]"
    assert list(section.blocks[0].frame.loc["SparsePerturbedLinear(k=2)"]) == ["n/a", none, none]
    for block in section.blocks[1:]:
        assert list(block.frame.loc["SparsePerturbedLinear(k=2)"])[1:] == [none, none]
    assert "[1] no samples: the row was stored without any, measure it again" in section.footnotes
    assert "nan" not in section.markdown()


@pytest.mark.parametrize("phase", ["sample", "update", "step"])
def test_phase_without_base_is_compared_with_its_forward(phase: str) -> None:
    """Where a baseline lacks a phase, its forward of the same case stands in and the note says so."""
    rows = [
        *three(SMALL),
        msgspec.structs.replace(time_row(DENSE, SMALL, 2, 20), phase=phase),
        msgspec.structs.replace(skipped(BASE, SMALL, "a plain layer has none"), phase=phase),
    ]
    (section,) = [s for s in time_sections(synthetic.run(rows), "Linear") if f", {phase}:" in s.title]
    block = frames(section)["Time multiplier vs. base"]
    assert list(block.index) == ["PerturbedLinear", "Base"]
    assert block.iloc[0, 0] == "2.00x"
    assert f"Base has no {phase}: its forward of the same case stands in." in section.text()
    assert f"Naive has no {phase}" in section.text()


def test_phase_with_a_naive_of_its_own_uses_it() -> None:
    """Where naive has the phase, it is compared with that."""
    rows = [
        *three(SMALL),
        time_row(DENSE, SMALL, 2, 20, phase="update"),
        time_row(NAIVE, SMALL, 6, 60, phase="update"),
    ]
    (section,) = time_sections(synthetic.run(rows), "Linear", "update")
    assert frames(section)["Speed multiplier vs. naive"].loc["PerturbedLinear", "(256, 256)"] == "3.00x"
    assert "Naive has no" not in section.text()


def test_phase_that_nobody_could_run_still_has_its_rows() -> None:
    """A run in which everything was skipped shows a row with a reason for each."""
    sections = time_sections(synthetic.run([skipped(DENSE, SMALL, "no device")]), "Linear")
    assert [list(s.blocks[0].frame.loc["PerturbedLinear"]) for s in sections] == [["no device [1]"]]


@pytest.mark.parametrize(
    ("reason", "status", "phases"),
    [
        ("a step is measured as a whole", "unavailable", ["step"]),
        ("out of memory: tried to allocate 9 GB", "unavailable", ["update", "step"]),
        ("ValueError", "failed", ["update", "step"]),
    ],
)
def test_phase_that_nobody_has_is_no_table(
    reason: str, status: Literal["unavailable", "failed"], phases: list[str]
) -> None:
    """Where others are timed; what might have had a number, and a reason for all phases, is shown."""
    lacking = msgspec.structs.replace(skipped(BASE, SMALL, reason, phase="update"), status=status)
    nowhere = skipped(DENSE, SMALL, "no device")
    sections = time_sections(
        synthetic.run([time_row(BASE, SMALL, 1, phase="step"), lacking, nowhere]), "Linear"
    )
    assert [one.title for one in sections] == [f"Linear, {phase}: time" for phase in phases]
    assert all("no device" in one.text() for one in sections)


def test_memory_tables() -> None:
    """Peak bytes stand in MB with their multiple of base, and the noise state in MB alone."""
    rows = [
        bytes_row(BASE, SMALL, "peak_bytes", 2_000_000),
        bytes_row(DENSE, SMALL, "peak_bytes", 5_000_000),
        bytes_row(DENSE, SMALL, "noise_bytes", 268_435_456, phase="sample"),
    ]
    peak, noise = memory_sections(synthetic.run(rows), "Linear")
    assert [block.title for block in noise.blocks] == ["Noise state of one step (MB)"]
    assert noise.blocks[0].frame.loc["PerturbedLinear", "(256, 256)"] == "268"
    assert list(frames(peak)["Memory multiplier vs. base"]["(256, 256)"]) == ["2.50x", "1.00x"]
    assert "(MB)" in peak.blocks[0].title


def test_other_metrics_have_a_table() -> None:
    """Counts and powers have tables in their own unit, and a metric without words its own name."""
    rows = [bytes_row(DENSE, SMALL, metric, 3) for metric in ("launches", "power_w", "energy_j", "unheard")]
    blocks = [section.blocks[0] for section in other_sections(synthetic.run(rows), "Linear")]
    assert [block.frame.iloc[0, 0] for block in blocks] == ["3", "3.00", "3000", "3"]
    assert [block.title for block in blocks] == [
        "Launches of one call (kernels on a GPU, operators on a CPU)",
        "Power draw (NVML) (W)",
        "Energy of one call, with what the idle device draws (mJ)",
        "unheard",
    ]


def test_methods_never_mix() -> None:
    """Two methods of timing give two sections, and no multiplier is taken across them."""
    rows = [*three(SMALL), time_row(DENSE, SMALL, 1.0, method="graph")]
    host, graph = time_sections(synthetic.run(rows), "Linear")
    assert "method" not in host.conditions
    assert "method graph" in graph.conditions
    assert [block.title for block in graph.blocks] == ["Time (ms)"]


def test_reason_of_one_method_stays_in_its_tables() -> None:
    """A graph that could not be captured is said where graphs are shown, and hides no other time."""
    reason = "graph capture failed: it reads the host"
    rows: list[Row] = [
        *(time_row(v, SMALL, 1, 1, method=method) for v in (BASE, DENSE) for method in ("eager", "graph")),
        time_row(SPARSE, SMALL, 2, 2, method="eager"),
        msgspec.structs.replace(skipped(SPARSE, SMALL, reason, "forward", method="graph"), status="failed"),
        skipped(NAIVE, SMALL, "too many launches", "forward", method="graph"),
        bytes_row(SPARSE, SMALL, "peak_bytes", 10),
    ]
    run = synthetic.run(rows)
    eager, graph = time_sections(run, "Linear")
    (memory,) = memory_sections(run, "Linear")
    assert eager.blocks[0].frame.loc["SparsePerturbedLinear(k=2)", "(256, 256)"] == "2.00"
    assert graph.blocks[0].frame.loc["SparsePerturbedLinear(k=2)", "(256, 256)"] == "failed [1]"
    assert list(eager.blocks[0].frame.index) == ["PerturbedLinear", "SparsePerturbedLinear(k=2)", "Base"]
    assert list(graph.blocks[0].frame.index)[-1] == "Naive"
    assert [any(reason in note for note in s.footnotes) for s in (eager, graph, memory)] == [0, 1, 0]


def test_method_by_which_nothing_was_measured_has_its_rows() -> None:
    """Where no graph of a run could be captured, there is a graph table of reasons."""
    rows: list[Row] = [time_row(BASE, SMALL, 1, method="eager")]
    rows += [skipped(BASE, SMALL, "no", "forward", method="graph")]
    methods = [section.conditions.split()[-1] for section in time_sections(synthetic.run(rows), "Linear")]
    assert methods == ["eager.", "graph."]


def test_failure_counts_before_any_other_reason() -> None:
    """A variant that failed for one method is not shown as merely unavailable for another reason."""
    failed = msgspec.structs.replace(skipped(DENSE, SMALL, "wrong"), status="failed")
    section = forward(*three(SMALL), failed, skipped(DENSE, SMALL, "no such device"))
    assert section.blocks[0].frame.loc["PerturbedLinear", "(256, 256)"] == "failed [1]"


def test_times_of_host_and_warm_caches_have_tables_of_their_own() -> None:
    """Cold, warm and host times never share a table or a multiplier; host stands beside device."""
    rows = [
        time_row(v, SMALL, *2 * [value * factor], method="eager", metric=metric)
        for metric, factor in (("latency_ns", 1), ("warm_latency_ns", 10), ("host_latency_ns", 100))
        for v, value in ((BASE, 1), (NAIVE, 8), (DENSE, 4))
        if (v, metric) != (NAIVE, "warm_latency_ns")
    ]
    run = synthetic.run(rows)
    (section,) = time_sections(run, "Linear")
    found = frames(section)
    assert list(found["Time (ms)"]["(256, 256)"]) == ["4.00", "1.00", "8.00"]
    assert list(found["Host time / device time (ms)"]["(256, 256)"]) == [
        "400 / 4.00",
        "100 / 1.00",
        "800 / 8.00",
    ]
    host, warm = other_time_sections(run, "Linear")
    assert [block.title for block in host.blocks] == [
        "Host time of issuing the call (ms)",
        "Speed multiplier vs. naive",
        "Time multiplier vs. base",
    ]
    assert [block.title for block in warm.blocks] == [
        "Time with warm caches (ms)",
        "Time multiplier vs. base",
    ]
    assert list(warm.blocks[1].frame["(256, 256)"]) == ["4.00x", "1.00x"]


def test_cases_of_one_shape_are_told_apart() -> None:
    """Columns that share a shape name the fields in which they differ, the others do not."""
    cases = [linear(256, members=64), linear(256, members=128), linear(512)]
    assert headings(cases) == ["(256, 256) members=64", "(256, 256) members=128", "(512, 512)"]


def test_headings_of_many_cases_cost_no_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case is asked for its shape a few times, however many there are."""
    asked: list[Case] = []

    def shape(case: Case) -> str:
        asked.append(case)
        return f"({case.out_channels}, {case.in_channels})"

    monkeypatch.setattr(Case, "shape", property(shape))
    names = headings([linear(256, members=members) for members in range(1, 101)])
    assert names[99] == "(256, 256) members=100"
    assert len(asked) <= 300


def test_every_grid_of_a_run_is_shown() -> None:
    """No measurement of a run is left out of all its tables."""
    rows: list[Row] = [
        time_row(DENSE, SMALL, 1.0, phase=phase) for phase in ("sample", "forward", "update", "step")
    ]
    rows += [
        bytes_row(DENSE, SMALL, name, 1) for name in ("peak_bytes", "noise_bytes", "utilization_percent")
    ]
    run = synthetic.run(rows)
    assert len(all_sections(run)) == len(rows) == len(grids(run, "Linear", ""))
