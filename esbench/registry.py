"""Registering, finding and building what is measured.

A package of variants registers with :func:`variant` and :func:`suite` and tells
:func:`build` how its kind of scheme becomes a :class:`Workload`. :mod:`esbench.plugins` finds
such packages; the harness never imports one itself.
"""

import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import singledispatch
from typing import Any, Protocol, TypeVar

from esbench.errors import UserError
from esbench.schema import PHASES, Case, Mode, Phase, Scalar, Variant, Work

Scheme = TypeVar("Scheme", bound=type)


class UnknownNameError(UserError):
    """A name or glob that matches nothing; the message lists what there is."""


class UnavailableError(Exception):
    """What was asked for cannot be had here; the message is the reason the row will carry."""


class WrongResultError(Exception):
    """The oracle found a variant wrong; the message says what and by how much."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """What is said of a variant's quality: one number for each replicate, or the reason for none."""

    metric: str
    method: str
    samples: tuple[float, ...] = ()
    reason: str = ""


class Workload(Protocol):
    """One variant set up on one case and device: what the loop measures.

    ``phases`` maps each phase the variant has to a call that does it once, on inputs that
    ``enter`` made ready; ``unavailable`` maps each phase it lacks to the reason. A call returns
    the tensor (or nested tensors) it computed.

    Calls in a row read different inputs, so that no result can serve twice: ``inputs`` are the tensors that
    they read in turn, the first of them after ``enter``, or nothing where a phase reads none. The harness may
    write other numbers into them.
    """

    def enter(self, phase: Phase) -> None:
        """Hold what the phase's call reads, and nothing else: called before a phase is measured.

        It is called again for ``sample`` and ``step`` when their call was captured in a CUDA graph: both then
        begin at the first turn and step, and what the graph reads stays where it is.
        """

    @property
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        """The calls to be measured."""

    @property
    def unavailable(self) -> Mapping[Phase, str]:
        """Phases this variant does not have, with the reason."""

    @property
    def inputs(self) -> Sequence[Any]:
        """The tensors that the calls of the entered phase read in turn."""

    def work(self, phase: Phase) -> Work | None:
        """Return the least that a call of this phase has to do, None where nobody has said."""

    @property
    def noise_bytes(self) -> int:
        """Bytes that the noise state of one step holds, 0 if it has none."""

    def verify(self) -> None:
        """Hold the variant to the slow truth on this very case.

        Raises:
            WrongResultError: it computes something else.

        """

    def confirm(self, phase: Phase) -> None:
        """Hold the entered phase's call, which was timed, to the slow truth on inputs that it has not seen.

        They are written into the very tensors that were read while it was timed.

        Raises:
            WrongResultError: it gives something else.

        """

    def quality(self) -> Iterable[Figure]:
        """Compute what the variant does to the gradient: nothing here is timed, and all of it repeatable.

        Called after ``enter("quality")``. A workload without this method has a row that says so.

        Raises:
            UnavailableError: the variant has no quality, and why.

        """
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered variant: its record, the scheme itself, and where it comes from."""

    variant: Variant
    scheme: object
    source: str
    package: str
    operators: tuple[str, ...] | None = None
    on_request: bool = False
    """Whether only a suite or a person lets it take part, by its name: it takes long to set up."""
    reserved: Collection[str] = dataclasses.field(default=(), compare=False, repr=False)

    def supports(self, case: Case) -> bool:
        """Whether the variant is meant for the case's operator: if it names none, for all unreserved ones."""
        named = self.operators
        return case.operator not in self.reserved if named is None else case.operator in named


@dataclasses.dataclass(frozen=True)
class Suite:
    """Which variants meet which cases, and how long a cell may take.

    ``variants`` are globs, see :meth:`Registry.select`; packages given as plugins are measured in any suite.
    ``cell_s`` bounds the seconds spent on one (case, variant, phase).
    A suite with a ``sweep`` goes from small cases to large ones by that field of a case; a variant that took
    longer than ``stop_s`` on one of them, or found no memory, is not tried on the larger ones.
    ``active`` are globs over case labels, ``active_variants`` over names of variants: on these a GPU's
    utilisation, power and energy are read, each for some seconds.
    On a GPU, ``methods`` are those by which a phase is timed, by default all, and ``traced`` the phases whose
    launches are counted and whose streams are checked: a step contains the others.
    """

    name: str
    description: str
    cases: tuple[Case, ...]
    variants: tuple[str, ...] = ("*",)
    phases: tuple[Phase, ...] = PHASES
    cell_s: float = 1.0
    sweep: str = ""
    stop_s: float = math.inf
    active: tuple[str, ...] = ("*",)
    active_variants: tuple[str, ...] = ("*",)
    methods: Mapping[Phase, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    traced: tuple[Phase, ...] = PHASES


class Registry:
    """Variants and suites by name. Refuses duplicates; an unknown name lists the known ones."""

    def __init__(self) -> None:
        """Start empty."""
        self.entries: dict[str, Entry] = {}
        self.suites: dict[str, Suite] = {}
        self.reserved: set[str] = set()

    def reserve(self, *operators: str) -> tuple[str, ...]:
        """Keep operators that are no layers for variants that name them; return them."""
        self.reserved.update(operators)
        return operators

    def variant(
        self,
        *,
        mode: Mode = "batched",
        baseline: bool = False,
        source: str = "",
        operators: tuple[str, ...] | None = None,
        on_request: bool = False,
        **grid: Scalar | tuple[Scalar, ...],
    ) -> Callable[[Scheme], Scheme]:
        """Register a scheme class once for every combination of the options in ``grid``.

        Returns the class untouched, so decorators can be stacked.

        Raises:
            ValueError: a variant of that name is registered already.

        """

        def register(scheme: Scheme) -> Scheme:
            values = [v if isinstance(v, tuple) else (v,) for v in grid.values()]
            for combination in itertools.product(*values):
                instance = scheme(**dict(zip(grid, combination, strict=True)))
                record = Variant(
                    scheme=scheme.__name__,
                    options=changed_options(instance),
                    mode=mode,
                    baseline=baseline,
                )
                if record.name in self.entries:
                    message = (
                        f"variant {record.name} is registered twice: by "
                        f"{self.entries[record.name].package} and by {scheme.__module__}"
                    )
                    raise ValueError(message)
                self.entries[record.name] = Entry(
                    variant=record,
                    scheme=instance,
                    source=source,
                    package=scheme.__module__.partition(".")[0],
                    operators=operators,
                    on_request=on_request,
                    reserved=self.reserved,
                )
            return scheme

        return register

    def suite(self, suite: Suite) -> Suite:
        """Register a suite.

        Raises:
            ValueError: a suite of that name is registered already.

        """
        if suite.name in self.suites:
            message = f"suite {suite.name} is registered twice"
            raise ValueError(message)
        self.suites[suite.name] = suite
        return suite

    def find_suite(self, name: str) -> Suite:
        """Return a suite by its name.

        Raises:
            UnknownNameError: there is none.

        """
        if name not in self.suites:
            message = f"no suite {name!r}; there are: {', '.join(sorted(self.suites))}"
            raise UnknownNameError(message)
        return self.suites[name]

    def select(self, globs: Iterable[str] = ("*",)) -> list[Entry]:
        """Entries whose name, or label on some operator, matches one of the globs.

        A glob after ``!`` leaves out what the ones before it chose: ``("*", "!Fused*")``. Order is that of
        registration, baselines last.

        Raises:
            UnknownNameError: a glob matches nothing.

        """
        chosen: set[str] = set()
        for glob in globs:
            wanted = glob.removeprefix("!")
            matching = {name for name, entry in self.entries.items() if self._matches(entry, wanted)}
            if not matching:
                message = f"no variant matches {wanted!r}; there are: {', '.join(self.entries)}"
                raise UnknownNameError(message)
            chosen = chosen - matching if glob.startswith("!") else chosen | matching
        entries = [entry for name, entry in self.entries.items() if name in chosen]
        return sorted(entries, key=lambda entry: entry.variant.baseline)

    def _matches(self, entry: Entry, glob: str) -> bool:
        operators = {case.operator for suite in self.suites.values() for case in suite.cases}
        labels = [entry.variant.name, *(entry.variant.label(name) for name in operators)]
        return any(fnmatch.fnmatchcase(label, glob) for label in labels)


def changed_options(instance: object) -> tuple[tuple[str, Scalar], ...]:
    """Fields of a dataclass instance that differ from their default, in field order; 1 and 1.0 differ."""
    if not dataclasses.is_dataclass(instance):
        return ()
    return tuple(
        (field.name, value)
        for field in dataclasses.fields(instance)
        if (value := getattr(instance, field.name)) != field.default or type(value) is not type(field.default)
    )


REGISTRY = Registry()
variant = REGISTRY.variant
suite = REGISTRY.suite


@singledispatch
def build(scheme: object, case: Case, device: str, seed: int) -> Workload:
    """Set a registered scheme up on a case: extend with ``@build.register``.

    Raises:
        UnavailableError: the scheme cannot serve the case here, and why.

    """
    message = f"no workload is known for {type(scheme).__name__} on {case.label} ({device}, {seed})"
    raise UnavailableError(message)
