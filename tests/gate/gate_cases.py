"""Invented evidence, fake workers that send it, and decisions."""

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from esbench.gate.decision import Evidence, decide
from esbench.gate.gate import Gate, Start, timed_cells
from esbench.gate.records import (
    ARMS,
    MORE,
    SAME,
    SCHEMA,
    Arm,
    Begin,
    Bounds,
    Cell,
    Decision,
    End,
    Message,
    Opening,
    Orders,
    Replicate,
    Revision,
    Settings,
    Status,
    Surveyed,
    Verdict,
)
from esbench.gate.worker_process import WorkerError
from esbench.schema import Case, Variant
from tests import synthetic

CASE = Case(operator="Linear", out_channels=4, in_channels=4, members=8)
SETTINGS = Settings()
QUIET = 0.0002
"""Relative spread of replicates on a quiet machine."""
CONTROLS = {f"{SAME} | host": 0.0, f"{MORE} | host": 0.02}
COUNTS = {"peak_bytes": 1000.0, "launches": 7.0, "graphs": 1.0}
NS = 1e6

Shares = Mapping[str, float]


def cell(scheme: str, method: str = "host") -> Cell:
    """Return a cell of a variant without options."""
    return Cell(variant=Variant(scheme=scheme), case=CASE, phase="forward", method=method)


ABLE, BAKER, DOG = CELLS = tuple(cell(name) for name in ("Able", "Baker", "Dog"))


def spread(share: float, count: int, noise: float = QUIET) -> list[float]:
    """Return ``count`` log ratios, evenly spaced around log(1 + share), which is their mean."""
    return [math.log1p(share) + noise * (2 * index / (count - 1) - 1) for index in range(count)]


def surveyed(cell: Cell, arm: Arm, status: str = "ok", reason: str = "", **more: float) -> Surveyed:
    """Return the row of a cell in an arm; if its status is "ok", with the counts of all cells or others."""
    figures = COUNTS | more if status == "ok" else {}
    return Surveyed(cell, arm, status, figures, reason, timed=True)  # type: ignore[arg-type]  # a status


def surveys(cells: Iterable[Cell] = CELLS, *changed: Surveyed) -> list[Surveyed]:
    """Return surveys in which both arms have all cells and the same counts, except for the changed rows."""
    rows = {(cell, arm): surveyed(cell, arm) for cell in cells for arm in ARMS}
    return [*(rows | {(row.cell, row.arm): row for row in changed}).values()]


OPENING = Opening(
    schema=SCHEMA,
    gate_id="20260101T000000Z-gate-0001",
    started="2026-01-01T00:00:00+00:00",
    seed=0,
    suite="gate",
    revisions={"base": Revision("main", "b" * 40), "head": Revision("HEAD", "a" * 40)},
    environment=synthetic.environment(),
)


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
    shares = {cell.name: 0.0 for cell in timed_cells(rows)} | dict(shares or {})
    measured = {name: (share, noise) for name, share in shares.items()}
    measured |= {name: (share, QUIET) for name, share in controls.items()}
    log_ratios = {
        name: [spread(share, count, width) for count in SETTINGS.new_replicates][:looks]
        for name, (share, width) in measured.items()
    }
    return Evidence(OPENING, rows, log_ratios)


def replay(measured: Evidence, dies_in: str = "") -> Start:
    """Return a function that starts fake workers, which send this evidence, or die in "survey" or "look"."""
    cells = [*dict.fromkeys(row.cell for row in measured.surveys)]

    def messages(orders: Orders) -> Iterator[Message]:
        yield Begin("a check", 0, 1)
        if dies_in == ("look" if orders.names else "survey"):
            raise WorkerError("the worker ended with signal 9")
        if not orders.names:
            share = cells[orders.process :: orders.processes]
            yield from (row for row in measured.surveys if row.cell in share)
        for name in orders.names:
            for log_ratio in measured.log_ratios[name][orders.look][orders.process :: orders.processes]:
                arms = [((NS * math.exp(log),),) * 2 for log in (0.0, log_ratio)]
                yield Replicate(orders.look, orders.process, name, ARMS[:1], *arms)
        yield End()

    def start(orders: Sequence[Orders], folder: Path) -> Generator[Message]:
        assert folder
        for order in orders:
            yield from messages(order)

    return start


def fake_gate(folder: Path, start: Start) -> Gate:
    """Return a gate on fake workers, whose revisions would be in a folder."""
    return Gate(
        orders=Orders(roots={arm: str(folder / arm) for arm in ARMS}, device="cpu", suite="gate"),
        revisions={arm: Revision(asked=arm, commit="0" * 40) for arm in ARMS},
        environment=synthetic.environment(),
        cores=(None, None),
        start=start,
    )


def decided(measured: Evidence, settings: Settings = SETTINGS) -> Decision:
    """Return the decision on the evidence."""
    return decide(measured, settings)


def decision(*verdicts: Verdict, **fields: Any) -> Decision:
    """Return a decision with these verdicts and fields, whatever the decision rule would return."""
    changed = {"verdicts": verdicts, "invalid": (), "exit_code": 0, **fields}
    return msgspec.structs.replace(decided(Evidence(OPENING, [], {})), **changed)


def timed(name: str, effect: float, half: float = 0.001, status: Status = "PASS") -> Verdict:
    """Return the verdict on the time of a cell, with bounds at the same distance on both sides."""
    return Verdict(name, "latency_ns", status, Bounds(effect, effect - half, effect + half, 0.001, 10))
