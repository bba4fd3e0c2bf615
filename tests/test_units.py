"""How numbers are shown."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.units import ABSENT, format_cell, format_multiplier, format_number, format_value, quantity

FINITE = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.0629, "0.0629"),
        (0.9999, "1.00"),
        (1.0, "1.00"),
        (12.984, "13.0"),
        (99.96, "100"),
        (146.832, "147"),
        (24484.4, "24484"),
        (1.234e-9, "1.23e-09"),
        (-2.5, "-2.50"),
    ],
)
def test_three_significant_digits(value: float, shown: str) -> None:
    """A number has three significant digits, and whole numbers keep all of theirs."""
    assert format_number(value) == shown


@given(FINITE.filter(lambda value: value == 0 or 1e-300 < abs(value) < 1e15))
def test_shown_number_is_near_the_number(value: float) -> None:
    """What is shown is never further from the number than half a unit of the third digit."""
    assert math.isclose(float(format_number(value)), value, rel_tol=0.5001e-2)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_no_number_is_said(value: float | None) -> None:
    """A missing or non-finite number is never shown as a number."""
    shown = {format_number(value), format_multiplier(value)}
    shown |= {
        show(metric, value) for metric in ("latency_ns", "calls") for show in (format_cell, format_value)
    }
    assert shown == {ABSENT}


@pytest.mark.parametrize(
    ("metric", "value", "cell", "sentence"),
    [
        ("latency_ns", 63_000, "0.0630", "0.0630 ms"),
        ("peak_bytes", 4_294_967_296, "4295", "4.29 GB"),
        ("noise_bytes", 2048, "0.00205", "2.05 kB"),
        ("noise_bytes", 0, "0", "0 B"),
        ("peak_bytes", 12, "0.0000120", "12.0 B"),
        ("utilization_percent", 50.0, "50.0", "50.0 %"),
        ("accuracy", 0.9796, "98.0", "98.0 %"),
        ("nonzero_count", 2587, "2587", "2587"),
        ("density_percent", 10.0054, "10.0", "10.0 %"),
        ("live_gradient_bytes", 262144, "0.262", "262 kB"),
        ("power_w", 512.5, "512", "512 W"),
        ("power_w", 0.5, "0.500", "500 mW"),
        ("energy_j", 0.0123, "12.3", "12.3 mJ"),
        ("net_energy_j", 12.0, "12000", "12.0 J"),
        ("clock_hz", 1.98e9, "1980", "1.98 GHz"),
        ("clock_hz", 345e6, "345", "345 MHz"),
        ("temperature_c", 61.0, "61.0", "61.0 °C"),
        ("achieved_flops_per_s", 6.7e13, "67.0", "67.0 TFLOP/s"),
        ("achieved_bytes_per_s", 4.1e12, "4100", "4.10 TB/s"),
        ("process_over_largest", 4.2, "4.20", "4.20 x"),
        ("process_over_largest", 3.0, "3.00", "3.00 x"),
        ("launches", 3.0, "3", "3"),
        ("launches", 2.5, "2.50", "2.50"),
    ],
)
def test_unit_follows_from_the_name(metric: str, value: float, cell: str, sentence: str) -> None:
    """The suffix of a metric's name decides the unit that it is shown in."""
    assert (format_cell(metric, value), format_value(metric, value)) == (cell, sentence)


def test_column_symbol() -> None:
    """Times stand in milliseconds and memory in megabytes at the head of a column."""
    symbols = [quantity(metric).column.symbol for metric in ("latency_ns", "peak_bytes", "calls")]
    assert symbols == ["ms", "MB", ""]


def test_multiplier() -> None:
    """A ratio ends in x."""
    assert format_multiplier(2.391) == "2.39x"
