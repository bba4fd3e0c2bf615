"""Screening: a short measurement of many variants at a small population, to choose the few to be measured."""

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from esbench.registry import Entry
from esbench.schema import (
    DENSE,
    QUALITY,
    SCHEMA_VERSION,
    Case,
    Environment,
    Phase,
    Record,
    Row,
    Run,
    RunHeader,
    Variant,
)
from esbench.stats import median
from esbench.text import first_names
from esbench.workload import build

if TYPE_CHECKING:
    from esbench.measure.instruments import Instruments
    from esbench.measure.plan import Plan
    from esbench.measure.recorder import Watch
    from esbench.progress import Show

KEPT = 8
"""The number of variants that are measured after screening, besides dense noise and base."""
RATED = 12
"""The number of variants, the fastest in screening, whose quality is measured."""
SHARE, STEP_SHARE = 0.5, 0.5
"""The share of the time budget that screening may take, and the share of screening for the times of steps."""
CELL_S = 0.02
"""Seconds for the samples of a step in screening: about three rounds."""
MIN_MEMBERS, MAX_ENTRIES, MAX_PRODUCTS = 8, 2**23, 2**30
"""The small population: at most as many entries of dense noise and multiplications in the shared product, but
at least as many members."""
CALLS, REFERENCE_CALLS, MIN_COST_S = 20, 40, 1.0
"""A variant is expected to cost this many steps, for checks and rounds, and at least these seconds. Dense
noise costs more, because it gets at least six rounds."""
MAX_REFERENCE_SHARE = 0.5
"""The largest share of the time that dense noise may take: it often takes longer than expected, because the
noise of the small population fits into a cache."""


@dataclass(frozen=True)
class Screened:
    """A variant with the rate and the cost that are expected at the full population.

    Attributes:
        rate: n_eff per second of a step; infinite for an exact estimate, 0 if n_eff is unknown.
        step_s: seconds of a step with one forward, as it is measured.
    """

    variant: Variant
    rate: float
    step_s: float

    @property
    def cost_s(self) -> float:
        """The expected seconds of the variant in a run."""
        calls = REFERENCE_CALLS if self.variant.name == DENSE else CALLS
        return max(MIN_COST_S, calls * self.step_s)


def small_case(case: Case) -> Case:
    """Return the case with fewer members, so that it is fast to measure."""
    member_products = case.repeats * math.prod(case.input_size) * _size(case)
    most = min(MAX_ENTRIES // _size(case), MAX_PRODUCTS // member_products)
    return msgspec.structs.replace(case, members=min(case.members, max(MIN_MEMBERS, most)))


def screen(
    plan: "Plan",
    environment: Environment,
    progress: "Show",
    tools: "Instruments",
    limit_bytes: float | None = None,
    watch: "Watch" = lambda *_: False,
    forwards: int = 1,
) -> dict[Case, list[Screened]]:
    """Time a step of all variants at a small population, rate the fastest, and return these, best first.

    Times and memory are taken as proportional to the population, and n_eff = n / (1 + kappa n / d). A step is
    rated as if it had ``forwards`` forwards; their time is then measured as well. Variants above the memory
    limit are left out. Dense noise is returned even if it is slow.
    """
    # The slowest are registered first: they come last, except for dense noise, which a run begins with.
    entries = [entry for entry in reversed(plan.entries) if _can_run(entry, plan, watch)]
    plan = replace(plan, entries=entries, checks=(), reference_phases=(), is_screening=True)
    screened = {}
    for index, case in enumerate(plan.cases):
        now_s = time.monotonic()
        end_s = now_s + (plan.end_s - now_s) / (len(plan.cases) - index)
        small_plan = replace(plan, cases=(small_case(case),), end_s=end_s)
        run = _measure_small(small_plan, environment, progress, tools, watch, forwards)
        screened[case] = extrapolate(run, case, limit_bytes, forwards)
    return screened


def _measure_small(
    plan: "Plan",
    environment: Environment,
    progress: "Show",
    tools: "Instruments",
    watch: "Watch",
    forwards: int,
) -> Run:
    """Time a step of all variants of a case, then rate the fastest, which takes longer."""
    from esbench.measure.runner import run_cases
    from esbench.report.analysis.rollout import with_forwards_per_step

    records: list[Record] = []
    now_s = time.monotonic()
    step_end_s = now_s + STEP_SHARE * (plan.end_s - now_s)
    timed_phases: tuple[Phase, ...] = ("step",) if forwards == 1 else ("forward", "step")
    step_plan = replace(plan, phases=timed_phases, cell_s=CELL_S, traced=(), end_s=step_end_s)
    run_cases(step_plan, records.extend, progress, tools, watch=watch)
    header = RunHeader(
        schema=SCHEMA_VERSION,
        run_id="screening",
        suite="screening",
        started="",
        seed=plan.seed,
        environment=environment,
    )
    run = Run(header=header, rows=_rows(records))
    step_ns = {
        row.variant: median(row) or math.inf
        for row in with_forwards_per_step(run, forwards).measurements
        if (row.phase, row.metric) == ("step", "latency_ns")
    }
    timed = [entry for entry in plan.entries if entry.variant.mode == "batched" and entry.variant in step_ns]
    timed.sort(key=lambda entry: step_ns[entry.variant])
    rated = [entry for rank, entry in enumerate(timed) if rank < RATED or entry.variant.name == DENSE]
    run_cases(replace(plan, entries=rated, phases=(QUALITY,)), records.extend, progress, tools, watch=watch)
    return msgspec.structs.replace(run, rows=_rows(records))


def _rows(records: Sequence[Record]) -> tuple[Row, ...]:
    return tuple(record for record in records if isinstance(record, Row))


def extrapolate(run: Run, case: Case, limit_bytes: float | None, forwards: int) -> list[Screened]:
    """Return what is expected of the variants of a run at the population of a case, best first.

    Variants whose quality was not measured, for which no time was left, come last: the fastest of them first.
    Those that turned out to have no n_eff are left out.
    """
    from esbench.report.analysis.ranking import recommend
    from esbench.report.analysis.rollout import with_forwards_per_step

    small = small_case(case)
    recommendation = recommend([with_forwards_per_step(run, forwards)], small)
    rated = {ranked.variant: ranked for ranked in recommendation.ranked} if recommendation else {}
    scale = case.members / small.members
    metrics = {(row.variant, row.metric) for row in run.measurements if row.phase == QUALITY}
    without_n_eff = {variant for variant, _ in metrics if (variant, "effective_members") not in metrics}
    screened = []
    for row in run.measurements:
        if (row.phase, row.metric) != ("step", "latency_ns") or row.variant.mode != "batched":
            continue
        if row.variant in without_n_eff:
            continue
        step_s = (median(row) or math.inf) / 1e9 * scale
        rate = peak_bytes = 0.0
        if ranked := rated.get(row.variant):
            kappa = max(ranked.kappa.mean, 0.0) if ranked.kappa else 0.0
            n_eff = case.members / (1 + kappa * case.members / _size(case))
            full_step_s = (ranked.step_ns or math.inf) / 1e9 * scale
            rate = math.inf if ranked.is_exact else n_eff / full_step_s
            peak_bytes = (ranked.peak_bytes or 0.0) * scale
        if limit_bytes is None or peak_bytes <= limit_bytes:
            screened.append(Screened(row.variant, rate, step_s))
    return sorted(screened, key=lambda variant: (-variant.rate, variant.step_s))


def choose(screened: Mapping[Case, Sequence[Screened]], left_s: float) -> tuple[list[str], list[str]]:
    """Return the names of the variants to be measured in the time that is left, and notes on the others.

    Each case gets the same share of the time. Dense noise comes first, because all others are compared with
    it; then the best variant, in any case.
    """
    names: dict[str, None] = {}  # in this order, each once
    notes = []
    case_s = left_s / max(len(screened), 1)
    for case, variants in screened.items():
        dense = next((variant for variant in variants if variant.variant.name == DENSE), None)
        others = [variant for variant in variants if variant is not dense]
        unspent_s, too_slow = case_s, []
        needed_s = sum(variant.cost_s for variant in (dense, *others[:1]) if variant)
        if dense:
            needed_s = max(needed_s, dense.cost_s / MAX_REFERENCE_SHARE)
        if dense and needed_s <= case_s:
            names[DENSE] = None
            unspent_s -= dense.cost_s
        elif dense:
            minutes = math.ceil(needed_s * len(screened) / (1 - SHARE) / 60)
            notes.append(
                f"{case.label}: {DENSE} (dense noise) is left out, a step takes about {dense.step_s:.2g} s: "
                f"--budget {60 * minutes} measures it"
            )
        for rank, variant in enumerate(others[:KEPT]):
            if rank > 0 and variant.cost_s > unspent_s:
                too_slow.append(variant.variant.name)
            else:
                names[variant.variant.name] = None
                unspent_s -= variant.cost_s
        if too_slow:
            notes.append(f"{case.label}: no time for {first_names(too_slow)}: give a longer --budget")
    return [*names], notes


def _can_run(entry: Entry, plan: "Plan", watch: "Watch") -> bool:
    """Return whether a variant can be set up on a case: a kernel may need a GPU."""
    for case in plan.cases:
        watch(entry.variant, case, "set-up")
        with contextlib.suppress(Exception):  # a variant's error of any kind; another variant is recommended
            build(entry.scheme, small_case(case), plan.device, plan.seed)
            return True
    return False


def _size(case: Case) -> int:
    """Return the number of entries of a weight."""
    return case.out_channels * case.in_channels * math.prod(case.kernel_size) // case.groups
