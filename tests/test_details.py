"""Every time of a run as CSV."""

import csv
import math

import msgspec

from esbench.report.details import times_csv
from tests import synthetic
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, time_row

SMALL = linear(256)
ROUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def lines(text: str) -> list[dict[str, str]]:
    """The lines by their column."""
    return list(csv.DictReader(text.splitlines()))


def test_each_time_has_its_views_and_multipliers() -> None:
    """A line holds quantiles, the interval over rounds, the floor and both multipliers with theirs."""
    dense = synthetic.working(time_row(DENSE, SMALL, *(2 * k for k in ROUNDS)), 1e7, 1e5)
    dense = msgspec.structs.replace(dense, stop="20 rounds", labels=("a", "b"))
    rows = [time_row(BASE, SMALL, *ROUNDS), time_row(NAIVE, SMALL, *(8 * k for k in ROUNDS)), dense]
    run = synthetic.run([*rows, bytes_row(DENSE, SMALL, "peak_bytes", 1)], device_peaks=synthetic.peaks())
    line = lines(times_csv(run))[0]
    expected = {
        "variant": "PerturbedLinear",
        "case": "Linear(256, 256)",
        "metric": "latency_ns",
        "rounds": "6",
        "samples": "6",
        "median": "7000000.0",
        "low": "2000000.0",
        "high": "12000000.0",
        "floor": "1000000.0",
        "outliers": "0.0",
        "stop": "20 rounds",
        "labels": "a; b",
        "naive_by_this": "4.0",
        "naive_by_this_low": "4.0",
        "this_by_base": "2.0",
        "this_by_base_high": "2.0",
        "this_by_base_taken": "inside rounds",
    }
    assert {name: line[name] for name in expected} == expected
    assert len(lines(times_csv(run))) == 3


def test_what_there_is_not_is_empty() -> None:
    """Rows without usable samples have empty cells, and a run without times no lines."""
    dead = msgspec.structs.replace(time_row(DENSE, SMALL), samples=((), (math.nan,)))
    (line,) = lines(times_csv(synthetic.run([dead])))
    assert {line[name] for name in ("median", "p20", "low", "floor", "this_by_base", "naive_by_this")} == {""}
    assert times_csv(synthetic.run([skipped(DENSE, SMALL, "no")])) == ""
