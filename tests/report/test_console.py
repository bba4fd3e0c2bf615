"""What a run prints when it ends."""

import re

import msgspec
import pytest

from esbench.report.tables.console import run_summary, warnings
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import SQUARE, rows
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, conv2d, linear, time_row, variant


def test_a_ranked_shape_shows_the_best_dense_noise_and_base() -> None:
    """The table is sorted by n_eff per ms, at most 100 columns wide, and includes dense noise and base."""
    title, header, *table = run_summary(ranking_cases.run()).rstrip().splitlines()
    assert title.startswith(
        "Best 5 variants of each shape, dense noise and base (rate: n_eff per ms of a step;"
    )
    layer, *columns = re.split(r"  +", header, maxsplit=1)
    assert layer == "Linear 64 -> 64, 1024 members"
    assert columns[0].split() == ["rate", "x", "dense", "step", "ms", "x", "base", "kept", "%", "MB"]
    assert len(table) <= 7
    assert max(map(len, (title, header, *table))) <= 100
    names = [line.split("  ")[0] for line in table]
    assert "Perturbed (dense noise)" in names
    assert names[0] == "Hadamard"
    assert "1.00x" in next(line for line in table if line.startswith("Perturbed (dense"))


def test_a_shape_without_quality_shows_times() -> None:
    """The fastest variants come first, then dense noise, base and naive; empty columns are left out."""
    schemes = [variant("SparsePerturbed", k=k) for k in range(1, 9)]
    times = {DENSE: 24.0, BASE: 2.0, NAIVE: 50.0, **{scheme: 3.0 + k for k, scheme in enumerate(schemes)}}
    timed = [time_row(v, linear(), ms) for v, ms in times.items()]
    run = synthetic.run(timed)
    _, header, *table = run_summary(run).rstrip().splitlines()
    assert re.split("  +", header)[:3] == [
        "Linear 256 -> 256, 1024 members",
        "forward (ms)",
        "faster than dense",
    ]
    assert "MB" not in header
    others = ["Base (plain layer)", "Perturbed (dense noise)", "Naive (one call per member)"]
    assert [line.split("  ")[0] for line in table] == [*(scheme.name for scheme in schemes[:5]), *others]
    assert table[0].split()[-3:] == ["3.00", "8.00x", "1.50x"]
    peak = bytes_row(schemes[0], linear(), "peak_bytes", 7_000_000)  # its method is not that of the times
    _, header, first, *_ = run_summary(synthetic.run([*timed, peak])).splitlines()
    assert header.endswith("MB")
    assert first.endswith("7.00")


def test_times_are_those_of_the_phase_that_most_variants_have() -> None:
    """A variant without a forward is not left out, and nobody wins because others lack one."""
    fast, slow = variant("Fast"), variant("Slow")
    timed = [time_row(slow, linear(), 1.0)]
    timed += [time_row(v, linear(), ms, phase="step") for v, ms in ((fast, 2.0), (slow, 3.0))]
    _, header, *table = run_summary(synthetic.run(timed)).rstrip().splitlines()
    assert "step (ms)" in header
    assert [line.split() for line in table] == [["Fast", "2.00"], ["Slow", "3.00"]]


def test_three_shapes_of_different_operators_are_shown() -> None:
    """Each operator comes before a second shape of another one; a line says how many are left out.

    Of a layer's options only those that differ from the default are named.
    """
    cases = [linear(width) for width in (64, 128, 256, 512)]
    cases.append(msgspec.structs.replace(conv2d(16, 32, members=1), stride=2))
    run = synthetic.run(time_row(v, case, 1.0) for case in cases for v in (BASE, DENSE))
    text = run_summary(run)
    titles = [line for line in text.splitlines() if "forward (ms)" in line]
    assert len(titles) == 3
    assert titles[0].startswith("Linear 512 -> 512")
    assert titles[1].startswith("Conv2d 16 -> 16, 3x3, 32x32, stride=2")
    assert text.rstrip().endswith("and 2 more shapes: --tables prints all")
    assert run_summary(synthetic.run([])) == ""


def test_fast_variants_that_keep_few_members_are_named() -> None:
    """A warning names the shape and the first three; slower variants than the best are left out."""
    (text,) = warnings(ranking_cases.run(rows(SQUARE)))
    assert text == "Linear 64 -> 64, 1024 members: fast, but of small n_eff: Flipped 59.4"
    slow = ranking_cases.STEPS | {ranking_cases.FLIPPED: 5.5}
    assert warnings(ranking_cases.run(rows(SQUARE, steps=slow))) == []
    many = [variant("DropoutBlocks", rank=rank) for rank in range(9)]
    kappas = ranking_cases.KAPPAS | dict.fromkeys(many, 900.0)
    steps = ranking_cases.STEPS | dict.fromkeys(many, 1.0)
    noises = dict.fromkeys(many, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking_cases, "NOISES", ranking_cases.NOISES | noises)
        (text,) = warnings(ranking_cases.run(rows(SQUARE, kappas, steps)))
    assert "n_eff: DropoutBlocks(rank=0) 4.53, " in text
    assert text.endswith("DropoutBlocks(rank=2) 4.53 and 7 more")


def test_long_names_and_reasons_fit_into_100_columns() -> None:
    """Names that differ in their options stay different; a failure is one line, however long its reason."""
    long = [variant("ASchemeWithANameOfMoreThanFortyTwoCharacters", rank=rank) for rank in range(3)]
    lines = run_summary(synthetic.run(time_row(v, linear(), 1.0) for v in long)).splitlines()[2:]
    assert len({line.split("  ")[0] for line in lines}) == len(lines) == 3
    failures = warnings(synthetic.run(synthetic.failed(v, linear(), "no such thing " * 20) for v in long))
    assert len(failures) == 3
    assert max(map(len, [*lines, *failures])) <= 100


def test_variants_that_were_not_checked_are_named() -> None:
    """A warning gives the label once, with the variants that have it."""
    label = "not checked in float64: out of memory: no details"
    timed = [time_row(v, linear(), 1.0) for v in (BASE, DENSE, variant("Flipped"))]
    labelled = [msgspec.structs.replace(row, labels=(label,)) for row in timed[1:]]
    assert warnings(synthetic.run([timed[0], *labelled])) == [f"Perturbed, Flipped: {label}"]
