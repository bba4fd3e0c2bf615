"""A company: the variants of one case that are resident together, and so share their rounds."""

import contextlib
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from esbench.measure import validation
from esbench.measure.failure import Failure, explain
from esbench.measure.memory import is_out_of_memory
from esbench.measure.oracle import Oracle
from esbench.measure.plan import is_baseline
from esbench.measure.stopwatch import Stopwatch
from esbench.measure.torch_state import TorchState
from esbench.registry import Entry, Workload, build
from esbench.schema import Case, Phase, Variant


@dataclass(frozen=True, eq=False)
class Member:
    """A variant, what it set up, and the prints of what each phase's first call gave."""

    entry: Entry
    workload: Workload
    prints: dict[Phase, validation.Prints] = field(default_factory=dict)


@dataclass
class CoResidentGroup:
    """Sets variants up side by side as far as memory goes.

    A variant that does not fit beside the others is ``deferred`` to the next company; one that
    does not fit beside base and naive alone is unavailable. ``faults`` says why an entry is no
    member.
    """

    case: Case
    device: str
    seed: int
    synchronize: Callable[[], object]
    watch: Stopwatch
    surroundings: TorchState = field(default_factory=TorchState)
    members: list[Member] = field(default_factory=list)
    deferred: list[Entry] = field(default_factory=list)
    faults: list[tuple[Entry, Failure]] = field(default_factory=list)

    def admit(self, entry: Entry, oracle: Oracle) -> None:
        """Set a variant up and hold it to its oracle, on small exact cases and on this one."""
        with self.watch.on("oracle"):
            fault = oracle.verdict(entry, self.case.operator)
        if fault:
            self.faults.append((entry, fault))
            return
        if not self._admitted(entry):
            release()

    def rehearse(self, phase: Phase, turn: Callable[[Entry], AbstractContextManager[None]]) -> None:
        """Go through a phase with all members in it, each inside its ``turn``, and audit what is computed."""
        called: set[Variant] = set()

        def enter(member: Member) -> None:
            with turn(member.entry), self.watch.on("inputs"):
                member.workload.enter(phase)

        def call(member: Member) -> None:
            with turn(member.entry):
                if member.entry.variant in called:  # it had no room the first time, and may have begun
                    member.workload.enter(phase)
                called.add(member.entry.variant)
                member.prints[phase] = validation.rehearse(
                    member.workload, phase, self.synchronize, self.watch
                )
                self.surroundings.check()

        self._each_in(phase, enter)
        self._each_in(phase, call)

    def in_phase(self, phase: Phase) -> list[Member]:
        """Return the members that have the phase, those of every company first."""
        return [member for member in self.members if phase in member.workload.phases]

    @property
    def variants(self) -> list[Variant]:
        """The members' variants."""
        return [member.entry.variant for member in self.members]

    @property
    def guests(self) -> list[Member]:
        """The members that base and naive are there to be compared with."""
        return [member for member in self.members if not is_baseline(member.entry)]

    def _admitted(self, entry: Entry) -> bool:
        try:
            workload = build(entry.scheme, self.case, self.device, self.seed)
            with self.watch.on("oracle"):
                workload.verify()
            self.surroundings.check()
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            self._turn_away(entry, error)
            return False
        self.members.append(Member(entry, workload))
        return True

    def _each_in(self, phase: Phase, action: Callable[[Member], None]) -> None:
        """Try each member; no reference is kept to one that leaves, so that its memory is free."""
        passed: set[Variant] = set()
        while entry := next((m.entry for m in self.in_phase(phase) if m.entry.variant not in passed), None):
            if self._tried(entry, action):
                passed.add(entry.variant)
            else:
                release()

    def _tried(self, entry: Entry, action: Callable[[Member], None]) -> bool:
        """Do something with a member; if it fails, somebody leaves."""
        member = next(member for member in self.members if member.entry is entry)
        try:
            action(member)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
            makes_room = is_out_of_memory(error) and is_baseline(entry) and self.guests
            leaver = self.guests[-1] if makes_room else member
            self.members.remove(leaver)
            self._turn_away(leaver.entry, error)
            return False
        return True

    def successors(self) -> list[Entry]:
        """Return who sits in the next company: base and naive again, and those who had no room."""
        hosts = [member.entry for member in self.members if is_baseline(member.entry)]
        return [*hosts, *self.deferred] if self.deferred else []

    def disband(self) -> None:
        """Let go of everything that was set up."""
        self.members.clear()
        release()

    def _turn_away(self, entry: Entry, error: BaseException) -> None:
        if is_out_of_memory(error) and self.guests:
            self.deferred.append(entry)
        else:
            self.faults.append((entry, explain(error)))


def release() -> None:
    """Return to the device what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # of a device that is gone; whoever asks next is told
            torch.cuda.empty_cache()
