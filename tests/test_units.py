"""How numbers and their units are displayed."""

import math

from hypothesis import given
from hypothesis import strategies as st

from esbench.units import (
    ABSENT,
    format_cell,
    format_multiplier,
    format_number,
    format_value,
    last_digit_exponent,
    quantity,
)


def test_three_significant_digits() -> None:
    """A number has three significant digits; a whole number keeps all its digits."""
    values = (0.0, 0.0629, 0.9999, 1.0, 12.984, 99.96, 146.832, 24484.4, 1.234e-9, -2.5)
    shown = "0 0.0629 1.00 1.00 13.0 100 147 24484 1.23e-09 -2.50"
    assert " ".join(map(format_number, values)) == shown


def test_missing_numbers_are_absent() -> None:
    """A missing or non-finite number is never displayed as a number."""
    cases: list[float | None] = [None, math.nan, math.inf, -math.inf]
    for value in cases:
        shown = {format_number(value), format_multiplier(value)}
        shown |= {
            show(metric, value) for metric in ("latency_ns", "calls") for show in (format_cell, format_value)
        }
        assert shown == {ABSENT}


def test_unit_follows_from_the_name() -> None:
    """The suffix of a metric's name determines its displayed unit."""
    cases: list[tuple[str, float, str, str]] = [
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
    ]
    for metric, value, cell, sentence in cases:
        assert (format_cell(metric, value), format_value(metric, value)) == (cell, sentence)


def test_digits_follow_the_interval() -> None:
    """A number is rounded to the first digit of its half width, or to the second if the first is 1."""
    cases: list[tuple[float, float | None, str, str]] = [
        (1.2345, 0.0412, "1.23", "1.23 ± 0.04"),
        (1.2345, 0.0142, "1.234", "1.234 ± 0.014"),
        (1.2345, 0.096, "1.23", "1.23 ± 0.10"),
        (417.0, 63.0, "420", "420 ± 60"),
        (24484.4, 310.0, "24500", "24500 ± 300"),
        (0.4, 3.0, "0.4", "0 ± 3"),
        (9.97, 0.4, "10.0", "10.0 ± 0.4"),
        (0.0, 0.3, "0", "0.0 ± 0.3"),
        (1.2345678, 1.2e-7, "1.23457", "1.23457 ± 0.00001"),
        (1234567.0, 0.01, "1234567", "1234567 ± 1"),
        (16.666666666666668, 2e-15, "16.7", "16.7"),
        (1e-7, 3e-9, "1.00e-07", "1.00e-07 ± 3e-09"),
        (1e-8, 1.0, "1e-08", "0.0 ± 1.0"),
        (12.984, 0.0, "13.0", "13.0"),
        (12.984, None, "13.0", "13.0"),
        (12.984, math.inf, "13.0", "13.0"),
        (math.nan, 1.0, "n/a", "n/a"),
    ]
    for value, half, shown, between in cases:
        assert format_number(value, half) == shown
        assert format_number(value, half, with_interval=True) == between


POSITIVE = st.floats(min_value=1e-5, max_value=1e9)
PAIRS = st.tuples(
    st.floats(min_value=-1e9, max_value=1e9).filter(lambda value: abs(value) > 1e-5), POSITIVE
).filter(lambda pair: pair[1] > 2e-9 * abs(pair[0]))


@given(PAIRS)
def test_digits_end_where_the_interval_ends(pair: tuple[float, float]) -> None:
    """A half width has at most two digits, and a number all digits that it determines, up to six."""
    value, half = pair
    exponent = last_digit_exponent(value, half)
    leading = math.floor(math.log10(abs(value)) + 1e-9)
    assert exponent <= leading + 1  # the number keeps a digit, even if it is rounded up
    if exponent < leading:
        assert 10.0**exponent >= half / 20.001  # at most two digits of the half width
    if exponent > -5 + leading:
        assert 10.0**exponent <= max(half, 10.0 ** (leading + 1)) * 1.0001


@given(PAIRS)
def test_rounding_stays_within_half_a_digit(pair: tuple[float, float]) -> None:
    """Number and half width have the same last digit, and rounding changes each by at most half of it."""
    value, half = pair
    shown, _, width = format_number(value, half, with_interval=True).partition(" ± ")
    assert (shown.partition(".")[2] != "") == (width.partition(".")[2] != "")
    assert len(shown.partition(".")[2]) == len(width.partition(".")[2])
    unit = (
        10.0 ** -len(width.partition(".")[2])
        if "." in width
        else 10.0 ** max(0, last_digit_exponent(1, half))
    )
    assert abs(float(shown) - value) <= max(unit, half) * 0.5001
    assert float(width) > 0
    assert half / 1.5001 <= float(width) <= max(half * 1.5001, unit * 1.0001, 1)


def test_a_cell_and_its_interval_are_in_the_unit_of_the_column() -> None:
    """Half widths are passed in stored units and displayed in the column's unit."""
    assert quantity("latency_ns").column.symbol == "ms"
    assert format_cell("latency_ns", 1_234_500, 41_200) == "1.23"
    assert format_cell("latency_ns", 1_234_500, 41_200, with_interval=True) == "1.23 ± 0.04"
    assert format_cell("launches", 3.0, 0.0, with_interval=True) == "3"
    assert format_cell("launches", None, 1.0, with_interval=True) == ABSENT
    assert format_multiplier(2.391, 0.12) == "2.39x"
    assert format_multiplier(2.391, 0.12, with_interval=True) == "2.39 ± 0.12x"
    assert format_multiplier(math.nan, 0.12, with_interval=True) == ABSENT


def test_at_least_three_digits_on_request() -> None:
    """A ranking keeps three digits where the interval supports fewer; next to a half width it does not."""
    assert [format_number(value, 5.0, least_digits=3) for value in (80.04, 1432.0, 68.1)] == [
        "80.0",
        "1432",
        "68.1",
    ]
    assert format_number(1432.0, 400.0, least_digits=3) == "1430"
    assert format_number(80.04, 5.0, with_interval=True, least_digits=3) == "80 ± 5"
