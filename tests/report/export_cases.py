"""Runs that are hard on other tools: names that mean something to them, no numbers, many methods."""

from esbench.schema import Case, Measurement, Row, Run, Skipped, Variant
from tests import synthetic
from tests.synthetic import BASE, DENSE, bytes_row, linear, skipped, time_row, variant

CASE = linear(128, members=256)
HOSTILE = (
    *(
        "=cmd|' /C calc'!A0",
        '"quoted", and | piped',
        "line\nbreak\r\nand\ttab",
        "rocket 🚀",
        "@SUM(A1)",
        "'=1",
    ),
    *(
        "+1",
        "-1",
        "=1+1",
        "[x]",
        "a-b",
        "\x00nul\x1b[31m",
        "../../up",
        "<svg onload=x>",
        "%s {0}",
        "x" * 400,
        "",
    ),
)
"""Schemes, and operators, as a foreign file may call them."""


def hostile() -> Run:
    """A run in which variant, operator, metric and method have such names, each in turn."""
    rows: list[Row] = []
    for text in HOSTILE:
        case = Case(operator=text, out_channels=4, in_channels=4)
        rows.append(time_row(variant(text), CASE, 1.0, 2.0))
        rows.append(time_row(DENSE, case, 1.0, 2.0))
        rows.append(time_row(DENSE, CASE, 1.0, metric=f"{text}_ns"))
        rows.append(time_row(DENSE, CASE, 1.0, method=text))
        rows.append(skipped(variant(text), case, text))
    return synthetic.run(rows, run_id="=cmd()", device_name='"GPU", 🚀')


def failed(
    variant: Variant, case: Case, phase: str | None = "forward", reason: str = "oracle: wrong"
) -> Skipped:
    """A row of a variant that was found wrong in a phase."""
    assert phase in {None, "sample", "forward", "update", "step"}
    return Skipped(variant=variant, case=case, phase=phase, status="failed", reason=reason)  # type: ignore[arg-type]  # looked at above


def empty(case: Case = CASE) -> Measurement:
    """A row without any round."""
    return time_row(variant("Roundless"), case)


def of_cuda() -> list[Row]:
    """What a GPU has of one phase: two methods, three times of one of them, bytes and launches."""
    times: list[Row] = [
        time_row(DENSE, CASE, 1.0, 3.0, method=method, metric=metric)
        for method, metric in (
            ("eager", "latency_ns"),
            ("eager", "warm_latency_ns"),
            ("eager", "host_latency_ns"),
            ("graph", "latency_ns"),
        )
    ]
    return [
        *times,
        bytes_row(DENSE, CASE, "peak_bytes", 4096),
        bytes_row(DENSE, CASE, "launches", 3),
        time_row(BASE, CASE, 0.5, 0.5, method="eager"),
    ]
