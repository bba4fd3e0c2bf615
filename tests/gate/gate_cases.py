"""Invented evidence and decisions of gates, for tests of the decision and its presentation."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from esbench.gate.decision import Evidence, decide
from esbench.gate.records import (
    ARMS,
    MORE,
    SAME,
    SCHEMA,
    Arm,
    Bounds,
    Cell,
    Decision,
    Opening,
    Revision,
    Settings,
    Status,
    Surveyed,
    Verdict,
)
from esbench.schema import Case, Variant
from tests import synthetic

CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)
SETTINGS = Settings()
QUIET = 0.0002
"""Relative spread of replicates on a quiet machine."""
CONTROLS = {f"{SAME} | host": 0.0, f"{MORE} | host": 0.02}
COUNTS = {"peak_bytes": 1000.0, "launches": 7.0}

Shares = Mapping[str, float]


def cell(scheme: str, method: str = "host") -> Cell:
    """Return a cell of a variant without options."""
    return Cell(variant=Variant(scheme=scheme), case=CASE, phase="forward", method=method)


ABLE, BAKER, DOG = CELLS = tuple(cell(name) for name in ("Able", "Baker", "Dog"))


def spread(share: float, count: int, noise: float = QUIET) -> list[float]:
    """Return ``count`` log ratios, evenly spaced around log(1 + share), which is their mean."""
    return [math.log1p(share) + noise * (2 * index / (count - 1) - 1) for index in range(count)]


def surveyed(surveyed_cell: Cell, arm: Arm, status: str = "ok", reason: str = "") -> Surveyed:
    """Return the row of a cell in an arm; with the same counts for all cells if its status is "ok"."""
    figures = COUNTS if status == "ok" else {}
    return Surveyed(cell=surveyed_cell, arm=arm, status=status, figures=figures, reason=reason)  # type: ignore[arg-type]  # a status


def surveys(cells: Iterable[Cell] = CELLS) -> list[Surveyed]:
    """Return surveys in which both arms have all cells and the same counts."""
    return [surveyed(cell, arm) for cell in cells for arm in ARMS]


def evidence(
    shares: Shares | None = None,
    *,
    looks: int = 9,
    noise: float = QUIET,
    rows: Sequence[Surveyed] | None = None,
    controls: Shares = CONTROLS,
) -> Evidence:
    """Return the evidence of a whole gate, or of its first looks.

    Cells have no effect, except for the given slowdowns.
    """
    rows = surveys() if rows is None else rows
    timed = [*dict.fromkeys(row.cell for row in rows)]
    shares = {cell.name: 0.0 for cell in timed} | dict(shares or {})
    measured = {name: (share, noise) for name, share in shares.items()}
    measured |= {name: (share, QUIET) for name, share in controls.items()}
    log_ratios = {
        name: [spread(share, count, width) for count in SETTINGS.new_replicates][:looks]
        for name, (share, width) in measured.items()
    }
    return Evidence(list(rows), timed, log_ratios)


def decided(measured: Evidence, *invalid: str, settings: Settings = SETTINGS) -> Decision:
    """Return the decision on the evidence, measured on an invented machine."""
    opening = Opening(
        schema=SCHEMA,
        gate_id="20260101T000000Z-gate-0001",
        started="2026-01-01T00:00:00+00:00",
        seed=0,
        suite="gate",
        revisions={"base": Revision("main", "b" * 40), "head": Revision("HEAD", "a" * 40)},
        environment=synthetic.environment(),
    )
    return decide(opening, measured, settings, wall_s=12.0, invalid=invalid)


def decision(*verdicts: Verdict, **fields: Any) -> Decision:
    """Return a decision with these verdicts and fields, whatever the decision rule would return."""
    changed = {"verdicts": verdicts, "invalid": (), "exit_code": 0, **fields}
    return msgspec.structs.replace(decided(Evidence()), **changed)


def timed(name: str, effect: float, half: float = 0.001, status: Status = "PASS") -> Verdict:
    """Return the verdict on the time of a cell, with bounds at the same distance on both sides."""
    return Verdict(name, "latency_ns", status, Bounds(effect, effect - half, effect + half, 0.001, 10))
