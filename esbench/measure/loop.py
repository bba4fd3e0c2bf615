"""The one loop over cases, variants and phases: every number of a run comes from here."""

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from esbench.measure import capacity, memory
from esbench.measure.budget import Budget
from esbench.measure.company import Company
from esbench.measure.fault import explain
from esbench.measure.instruments import Instruments
from esbench.measure.ledger import Ledger, Outcome, Store
from esbench.measure.oracle import Oracle
from esbench.measure.plan import Plan
from esbench.measure.precision import missing_type, precision
from esbench.measure.sitting import Bench, Sitting
from esbench.measure.stopwatch import Stopwatch
from esbench.measure.tracing import traced
from esbench.progress import Show
from esbench.records import OUT_OF_MEMORY, Case, Measurement, Phase, Row, Settled, Skipped, Variant

CAPACITY_CELLS = 20
"""The search for the largest population may take as long as so many cells."""


@dataclass(frozen=True)
class Past:
    """What an earlier part of the run has left: its rows, and what they settle."""

    rows: Sequence[Row] = ()
    settled: Sequence[Settled] = ()


def run(  # noqa: PLR0913, PLR0917  # a plan, where its rows go, and what it is measured with
    plan: Plan,
    store: Store,
    progress: Show,
    tools: Instruments,
    past: Past | None = None,
    watch: Stopwatch | None = None,
) -> Outcome:
    """Measure a plan; hand rows to ``store`` as soon as the phase they belong to is complete.

    A variant that raises, is wrong or does not fit gets a row with its reason and the run goes
    on. ``progress`` is called between measurements. ``KeyboardInterrupt`` and errors of
    ``store`` pass through; the rows of phases that were complete have been handed over by then.

    Raises:
        DeviceLostError: the device does not answer any more.

    """
    past = past or Past()
    ledger = Ledger(store, progress, past.rows, past.settled)
    oracle = Oracle(plan.checks, plan.device, plan.seed)
    limit = memory.ceiling() if plan.device == "cpu" else contextlib.nullcontext()
    with limit, _frozen():
        watch = watch or Stopwatch()
        budget = Budget(plan, watch.seconds, traces_last=tools.traces_last)
        bench = Bench(plan, oracle, ledger, tools, watch, budget)
        order = plan.order
        strangers: dict[str, None] = {}
        ledger.expect(sum(len(plan.entries_for(case)) for case in order) * len(plan.phases))
        for place, case in enumerate(order):
            if ledger.is_settled(case):
                ledger.finish(len(plan.entries_for(case)) * len(plan.phases))
                continue
            if reason := missing_type(case.dtype, plan.device):
                bench.settle(_without_type(case, plan, reason), case, 0, None, {})
                continue
            budget.begin(_waiting([case], bench), _waiting(order[place + 1 :], bench))
            with precision(case.dtype):
                costs_s = _measure_case(case, bench)
            larger = order[place + 1 :] if plan.sweep else []
            last: Iterable[Row] = (*_largest(case, bench), *_stopped(case, larger, bench, costs_s))
            bench.settle(last, case, 0, None, costs_s)
            strangers.update(dict.fromkeys(tools.strangers()))
        for case in order if tools.traces_last else ():
            if not ledger.is_traced(case):
                bench.settle([*traced(case, bench)], case, 0, None, {}, traced=True)
    for cut in budget.cuts(ledger.skipped):
        ledger.note(cut)
    return replace(ledger.outcome, strangers=tuple(strangers))


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Spare the garbage collector what was there before the run: it looks through it at every release."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure_case(case: Case, bench: Bench) -> Mapping[Variant, float]:
    """Measure all variants of a case, in as many companies as memory asks for; return what each cost."""
    entries = bench.plan.entries_for(case)
    waiting = [entry for entry in entries if not bench.ledger.reason(entry.variant, case)]
    phases = len(bench.plan.phases)
    bench.ledger.finish(phases * (len(entries) - len(waiting)))
    costs_s: dict[Variant, float] = {}
    number = 0
    while waiting:
        company = Company(case, bench.plan.device, bench.plan.seed, bench.tools.synchronize, bench.watch)
        sitting = Sitting(company, number, bench)
        try:
            sitting.set_up(waiting)
            waiting = company.successors()
            bench.ledger.expect(phases * (len(waiting) - len(company.deferred)))
            if number == 0 or company.guests:
                sitting.measure()
            else:
                bench.ledger.finish(phases * len(company.members))
        finally:
            company.disband()
        costs_s = {**sitting.costs_s, **costs_s}
        number += 1
    return costs_s


def _waiting(cases: Sequence[Case], bench: Bench) -> list[Variant]:
    """Return the variants that have no reason yet not to be measured on the cases, once for each case."""
    return [
        entry.variant
        for case in cases
        if not bench.ledger.is_settled(case)
        for entry in bench.plan.entries_for(case)
        if not bench.ledger.reason(entry.variant, case)
    ]


def _without_type(case: Case, plan: Plan, reason: str) -> Iterator[Skipped]:
    """Yield the reason for each variant: another type must not pass for the one that was asked for."""
    for entry in plan.entries_for(case):
        yield Skipped(variant=entry.variant, case=case, phase=None, status="unavailable", reason=reason)


def _largest(case: Case, bench: Bench) -> Iterator[Measurement]:
    """Yield a row for each variant without room: the largest population that has it."""
    plan = bench.plan
    if not plan.timed:
        return
    # Base and naive have no other phase in common.
    phase: Phase = "forward" if "forward" in plan.timed else plan.timed[0]
    for entry in plan.entries_for(case):
        spare_s = bench.budget.spare_s
        if not bench.ledger.reason(entry.variant, case).startswith(OUT_OF_MEMORY) or spare_s <= 0:
            continue
        bench.ledger.announce(entry.variant.label(case.operator), case.label, "largest population")
        fits = capacity.fitting(entry, case, phase, plan.device, plan.seed)
        try:
            with bench.watch.on("capacity"):
                found = capacity.largest(
                    fits, case.members, min(CAPACITY_CELLS * plan.cell_s, spare_s), bench.watch.seconds
                )
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, the run goes on
            bench.ledger.note(f"no largest population of {entry.variant.name}: {explain(error).reason}")
            continue
        yield Measurement(
            variant=entry.variant,
            case=case,
            phase=phase,
            metric="largest_members",
            method=capacity.METHOD,
            samples=((float(found.members),),),
            stop=found.stop,
        )


def _stopped(
    case: Case, larger: Sequence[Case], bench: Bench, costs_s: Mapping[Variant, float]
) -> Iterator[Skipped]:
    """Yield a reason for each larger case of a sweep that a variant will not be tried on."""
    plan = bench.plan
    for entry in plan.entries_for(case):
        cost_s = costs_s.get(entry.variant, 0.0) + bench.ledger.costs_s(case).get(entry.variant.name, 0.0)
        size = plan.size(case) if larger else 0
        if bench.ledger.reason(entry.variant, case).startswith(OUT_OF_MEMORY):
            reason = f"stopped: {OUT_OF_MEMORY} already at {plan.sweep} {size}"
        elif cost_s > plan.stop_s:
            took = f"{plan.sweep} {size} took {cost_s:.3g} s in all, above {plan.stop_s:g} s"
            reason = f"time budget: {took}"
        else:
            continue
        for other in larger:
            if plan.size(other) > size and entry.supports(other):
                yield Skipped(
                    variant=entry.variant, case=other, phase=None, status="unavailable", reason=reason
                )
