"""The one loop over cases, variants and phases: every number of a run comes from here."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from esbench.measure import memory
from esbench.measure import utilization as nvml
from esbench.measure.company import Company, Member, in_every_company
from esbench.measure.fault import Fault, explain
from esbench.measure.instruments import Instruments, instruments
from esbench.measure.ledger import Ledger, Outcome, Record
from esbench.measure.oracle import Oracle
from esbench.measure.rounds import Track, interleave
from esbench.progress import Show
from esbench.records import Case, Measurement, Phase, Row, Skipped
from esbench.registry import Entry

UTILIZED: Phase = "forward"
"""The phase whose utilisation is taken: the pass lasts seconds, and four would double a run."""


@dataclass(frozen=True)
class Plan:
    """What a run measures.

    ``cell_s`` is the budget in seconds of one variant and phase on one case. ``checks`` are the
    small exact cases of the suite named ``check``.
    """

    entries: Sequence[Entry]
    cases: Sequence[Case]
    phases: Sequence[Phase]
    cell_s: float
    checks: Sequence[Case] = ()
    device: str = "cpu"
    seed: int = 0


def run(plan: Plan, record: Record, progress: Show, tools: Instruments | None = None) -> Outcome:
    """Measure a plan; hand each row to ``record`` as soon as the phase it belongs to is complete.

    A variant that raises, is wrong or does not fit gets a row with its reason and the run goes
    on. ``progress`` is called between measurements. ``KeyboardInterrupt`` and errors of
    ``record`` pass through; the rows of phases that were complete have been handed over by then.
    """
    cases = list(plan.cases)
    random.Random(plan.seed).shuffle(cases)  # noqa: S311  # an order, not a secret
    pairs = sum(entry.supports(case) for case in cases for entry in plan.entries)
    ledger = Ledger(record, progress, pairs * len(plan.phases))
    oracle = Oracle(plan.checks, plan.device, plan.seed)
    limit = memory.ceiling() if plan.device == "cpu" else contextlib.nullcontext()
    with limit:
        tools = tools or instruments(plan.device)
        for case in cases:
            _measure_case(case, plan, oracle, ledger, tools)
    return ledger.outcome


def _measure_case(case: Case, plan: Plan, oracle: Oracle, ledger: Ledger, tools: Instruments) -> None:
    """Measure all variants of a case, in as many companies as memory asks for."""
    waiting = [entry for entry in plan.entries if entry.supports(case)]
    waiting.sort(key=in_every_company, reverse=True)
    number = 0
    while waiting:
        company = Company(case, plan.device, plan.seed)
        sitting = _Sitting(company, number, plan, ledger, tools)
        try:
            sitting.set_up(waiting, oracle)
            waiting = company.successors()
            ledger.expect(len(plan.phases) * (len(waiting) - len(company.deferred)))
            sitting.measure()
        finally:
            company.disband()
        number += 1


@dataclass(frozen=True)
class _Sitting:
    """One company, from setting it up to its last phase."""

    company: Company
    number: int
    plan: Plan
    ledger: Ledger
    tools: Instruments

    def set_up(self, entries: Sequence[Entry], oracle: Oracle) -> None:
        """Admit who passes the oracle and fits; write a row for everybody else."""
        for entry in entries:
            self._announce(entry, "set-up")
            self.company.admit(entry, oracle)
            self._write_faults()
        self.company.rehearse(self.plan.phases)
        self._write_faults()

    def _write_faults(self) -> None:
        """Write a row for everybody who was turned away since the last time."""
        while self.company.faults:
            entry, fault = self.company.faults.pop(0)
            self.ledger.enter([self._reason(entry, None, fault)])
            self.ledger.settle(len(self.plan.phases))

    def measure(self) -> None:
        """Measure phase after phase, in a seeded order."""
        seed = f"{self.plan.seed} {self.company.case.label} {self.number}"
        rng = random.Random(seed)  # noqa: S311  # an order, not a secret
        for phase in rng.sample(self.plan.phases, len(self.plan.phases)):
            skipped = []
            for member in self.company.members:
                if phase not in member.workload.phases:
                    reason = member.workload.unavailable.get(phase, f"it has no phase {phase}")
                    skipped.append(self._reason(member.entry, phase, Fault("unavailable", reason)))
            self.ledger.enter(skipped)
            self._measure_phase(phase, rng)
            self.ledger.settle(len(self.company.members))

    def _measure_phase(self, phase: Phase, rng: random.Random) -> None:
        """Time all members in the same rounds, then let each other instrument have its pass."""
        members = self.company.in_phase(phase)
        clock, budget_s = self.tools.clock, self.plan.cell_s
        tracks = [Track(member.workload, phase, clock, budget_s) for member in members]
        for member, track in zip(members, tracks, strict=True):
            self._announce(member.entry, phase)
            track.warm_up()
        interleave(tracks, rng)
        rows = []
        for member, track in zip(members, tracks, strict=True):
            self._announce(member.entry, f"{phase} memory")
            rows.extend(self._conclude(member, phase, track))
        self.ledger.enter(rows)

    def _conclude(self, member: Member, phase: Phase, track: Track) -> list[Row]:
        """Return the rows of a member and phase: all of its figures, or the reason for none."""
        entry, fault = member.entry, track.fault
        if not fault:
            try:
                return self._figures(member, phase, track)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
                fault = explain(error)
        return [self._reason(entry, phase, fault)]

    def _figures(self, member: Member, phase: Phase, track: Track) -> list[Row]:
        call = member.workload.phases[phase]
        figure = partial(
            Measurement,
            variant=member.entry.variant,
            case=self.company.case,
            phase=phase,
            company=self.number,
        )
        method, rounds = self.tools.clock.method, tuple(track.rounds)
        peak, held = self.tools.peak_bytes(call), member.workload.noise_bytes
        rows: list[Row] = [
            figure(metric="latency_ns", method=method, samples=rounds, stop=track.stop),
            figure(metric="peak_bytes", method=memory.METHOD, samples=((float(peak),),)),
        ]
        if phase == "sample":
            rows.append(figure(metric="noise_bytes", method="state", samples=((float(held),),)))
        if phase == UTILIZED and self.tools.utilization:
            share = self.tools.utilization(call)
            if share.samples:
                rows.append(
                    figure(metric="utilization_percent", method=nvml.METHOD, samples=(share.samples,))
                )
            else:
                self.ledger.note(f"no utilisation: {share.reason}")
        return rows

    def _reason(self, entry: Entry, phase: Phase | None, fault: Fault) -> Skipped:
        return Skipped(variant=entry.variant, case=self.company.case, phase=phase, **fault._asdict())

    def _announce(self, entry: Entry, what: str) -> None:
        case = self.company.case
        self.ledger.announce(entry.variant.label(case.operator), case.label, what)
