"""Variants and suites: how packages register them, how they are loaded, and how they are chosen by name.

A package of variants registers with :func:`variant` and :func:`suite`; :func:`build` and :func:`trainer` are
extended with how its schemes are set up on a case and trained with. The harness never imports such a package
itself: :func:`load` finds it by module name, file or entry point.
"""

import dataclasses
import fnmatch
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import singledispatch
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from esbench.errors import UserError
from esbench.schema import (
    DENSE,
    PHASES,
    QUALITY,
    Case,
    Mode,
    Outcome,
    Phase,
    Recipe,
    Scalar,
    SchemeDoc,
    Variant,
    Work,
)

Scheme = TypeVar("Scheme", bound=type)

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16")
ENTRY_POINTS = "esbench.variants"
DEFAULT = "impls"
"""The package that is always loaded."""
LOADED: dict[str, str] = {}
"""Names that were loaded -> their packages; a package registers once in a process."""


class UnknownNameError(UserError):
    """A name or glob that matches nothing; the message lists the known names."""


class PluginError(UserError):
    """A package of variants that cannot be loaded; the message names it and the reason."""


class UnavailableError(Exception):
    """The variant cannot run here; the message is the reason stored in its row."""


class WrongResultError(Exception):
    """A variant differs from the reference implementation; the message has the place and the difference."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """A quality figure of a variant: one number for each replicate, or the reason for none."""

    metric: str
    method: str
    samples: tuple[float, ...] = ()
    reason: str = ""


class Workload(Protocol):
    """A variant set up on a case and a device, as the measuring loop uses it.

    ``phases`` maps each phase the variant has to a call that does it once, on inputs that
    ``enter`` made ready; ``unavailable`` maps each phase it lacks to the reason. A call returns
    the tensor (or nested tensors) it computed.

    Calls in a row read different inputs, so that no result can serve twice: ``inputs`` are the tensors that
    they read in turn, the first of them after ``enter``, or nothing where a phase reads none. The harness may
    write other numbers into them.
    """

    def enter(self, phase: Phase) -> None:
        """Prepare the inputs of a phase's call and free those of other phases; called before measuring it.

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
        """Return the minimum work of a call of this phase, or None if it is unknown."""

    @property
    def noise_bytes(self) -> int:
        """The bytes of the noise state of one step, 0 without a state."""

    def verify(self) -> None:
        """Compare the variant with the reference implementation on this case.

        Raises:
            WrongResultError: it computes something else.

        """

    def confirm(self, phase: Phase) -> None:
        """Compare the call of the entered phase with the reference implementation on new inputs.

        The inputs are written into the tensors that were read while the call was timed.

        Raises:
            WrongResultError: it gives something else.

        """

    def quality(self) -> Iterable[Figure]:
        """Compute the variant's effect on the gradient, repeatably; it is not timed.

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
    """Whether it is measured only if a suite or an option names it, because its set-up takes long."""
    reserved: Collection[str] = dataclasses.field(default=(), compare=False, repr=False)

    def supports(self, case: Case) -> bool:
        """Return whether the variant supports the case's operator; by default all unreserved ones."""
        named = self.operators
        return case.operator not in self.reserved if named is None else case.operator in named


@dataclasses.dataclass(frozen=True)
class Suite:
    """A set of variants and cases that are measured together.

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
        """Reserve operators for the variants that name them; return the operators."""
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
            UnknownNameError: there is no such suite.

        """
        if name not in self.suites:
            message = f"no suite {name!r}; there are: {', '.join(sorted(self.suites))}"
            raise UnknownNameError(message)
        return self.suites[name]

    def select(self, globs: Iterable[str] = ("*",)) -> list[Entry]:
        """Return the entries whose name, or label on some operator, matches one of the globs.

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
    """Return the fields of a dataclass instance that differ from their default; 1 and 1.0 differ."""
    if not dataclasses.is_dataclass(instance):
        return ()
    return tuple(
        (field.name, value)
        for field in dataclasses.fields(instance)
        if (value := getattr(instance, field.name)) != field.default or type(value) is not type(field.default)
    )


def scheme_docs(entries: Iterable[Entry]) -> dict[str, SchemeDoc]:
    """Return the docstring of each scheme among registered variants, by the scheme's name."""
    docs = {}
    for entry in entries:
        kind = type(entry.scheme)
        exported = getattr(sys.modules.get(entry.package), kind.__name__, None) is kind
        module = entry.package if exported else kind.__module__
        docs[entry.variant.scheme] = SchemeDoc(module=module, text=inspect.cleandoc(kind.__doc__ or ""))
    return docs


REGISTRY = Registry()
variant = REGISTRY.variant
suite = REGISTRY.suite


@singledispatch
def build(scheme: object, case: Case, device: str, seed: int) -> Workload:
    """Set a registered scheme up on a case; packages extend this with ``@build.register``.

    Raises:
        UnavailableError: the scheme cannot serve the case here, and why.

    """
    message = f"no workload is known for {type(scheme).__name__} on {case.label} ({device}, {seed})"
    raise UnavailableError(message)


class Trainer(Protocol):
    """The interface for training with a kind of scheme; measuring does not need it."""

    def learns_from_rows(self, scheme: Any) -> bool:  # noqa: ANN401  # the package's own kind of scheme
        """Return whether the scheme's update needs the rows that its layers saw."""

    def refusal(self, scheme: Any, model: Any, exclude: Sequence[str]) -> str:  # noqa: ANN401  # the same, and an nn.Module
        """Return why a scheme cannot perturb a model without the modules named by ``exclude``, or ""."""

    def prepare(self, recipe: Recipe) -> None:
        """Check that a training of the digits study can begin.

        Raises:
            UserError: there is no such network, or what it learns from is missing.

        """

    def train(self, scheme: Any, recipe: Recipe, seed: int, device: str) -> Outcome:  # noqa: ANN401  # the same
        """Train a network of the digits study.

        Raises:
            UnavailableError: the scheme cannot serve the network.

        """


@singledispatch
def trainer(scheme: object) -> Trainer | None:  # noqa: ARG001  # dispatched on
    """Return the trainer of a scheme, None if unknown; packages extend this with ``@trainer.register``."""
    return None


def load(name: str) -> str:
    """Import a package of variants by module name or by file; return the package's name.

    Loading the same one twice does nothing.

    Raises:
        PluginError: it cannot be found or raises when imported.

    """
    if name in LOADED:
        return LOADED[name]
    try:
        package = _import_file(Path(name)) if name.endswith(".py") else _import_module(name)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:  # foreign code may raise anything: one line says it
        message = f"cannot load variants from {name}: {type(error).__name__}: {error}"
        raise PluginError(message) from error
    LOADED[name] = package
    return package


def installed(default: str = DEFAULT) -> list[str]:
    """Return the names of the default package and of all that declare the entry point; nothing is loaded."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return list(dict.fromkeys([default, *(point.module for point in points)]))


def load_installed(default: str = DEFAULT) -> None:
    """Load the default package and every package that declares the entry point."""
    for name in installed(default):
        load(name)


def _import_module(name: str) -> str:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        message = f"cannot load variants from {name}: no such module (a file's name ends in .py)"
        raise PluginError(message)
    return importlib.import_module(name).__name__.partition(".")[0]


def _import_file(path: Path) -> str:
    if not path.is_file():
        message = f"cannot load variants from {path}: no such file"
        raise PluginError(message)
    if path.stem in sys.modules:
        message = f"cannot load variants from {path}: a module {path.stem} is loaded already; rename the file"
        raise PluginError(message)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        message = f"cannot load variants from {path}: not a Python file"
        raise PluginError(message)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # whatever ends it, half a module is no module; raised again
        del sys.modules[path.stem]
        raise
    return path.stem


def with_references(entries: Sequence[Entry]) -> list[Entry]:
    """Add base, naive and dense noise, the references of every multiplier."""
    chosen = {entry.variant for entry in entries}
    return [e for e in REGISTRY.select() if e.variant in chosen or is_reference(e.variant)]


def is_reference(variant: Variant) -> bool:
    """Return whether other variants are compared with this one: base, naive or dense noise."""
    return variant.mode != "batched" or variant.name == DENSE


def candidates(entries: Sequence[Entry], *, named: bool) -> list[Entry]:
    """Return the variants that can be recommended for a layer, and base for comparison.

    Baselines are there to be compared with, and count only where they were named.
    """
    chosen = {entry.variant for entry in entries if entry.variant.mode == "batched"}
    return [
        entry
        for entry in REGISTRY.select()
        if not REGISTRY.reserved.issuperset(entry.operators or ("",))
        and (
            entry.variant.mode == "base"
            or (entry.variant in chosen and (named or not entry.variant.baseline))
        )
    ]


def shaped(name: str, cases: tuple[Case, ...]) -> Suite:
    """Return a suite of these cases with the phases that a ranking by n_eff per ms needs."""
    return Suite(
        name=name,
        description="cases given by shape",
        cases=cases,
        phases=("sample", "forward", "step", QUALITY),
        cell_s=0.3,
        active=(),
    )


def suited(entries: Sequence[Entry], suite: Suite, plugins: Collection[str]) -> list[Entry]:
    """Return the suite's variants, and all that plugin packages registered."""
    chosen = {entry.variant for entry in REGISTRY.select(suite.variants)}
    return [entry for entry in entries if entry.variant in chosen or entry.package in plugins]


def cases_of(suite: Suite, glob: str, dtype: str | None) -> tuple[Case, ...]:
    """Return the suite's cases that match the glob, converted to the dtype if one is given.

    Raises:
        UnknownNameError: no case matches, or there is no such type.

    """
    if dtype is not None and dtype not in DTYPES:
        message = f"no dtype {dtype!r}; there are: {', '.join(DTYPES)}"
        raise UnknownNameError(message)
    chosen = select_cases(suite.cases, glob)
    return tuple(msgspec.structs.replace(case, dtype=dtype) for case in chosen) if dtype else chosen


def select_cases(cases: Iterable[Case], glob: str) -> tuple[Case, ...]:
    """Return the cases whose label matches the glob.

    Raises:
        UnknownNameError: none does.

    """
    known = tuple(cases)
    chosen = tuple(case for case in known if fnmatch.fnmatchcase(case.label, glob))
    if not chosen:
        labels = "; ".join(case.label for case in known)
        message = f"no case matches {glob!r}; there are: {labels}"
        raise UnknownNameError(message)
    return chosen


def phases_named(names: str) -> tuple[Phase, ...]:
    """Return the phases named in a comma-separated list, in the order of a step; quality comes last.

    Raises:
        UnknownNameError: there is no such phase.

    """
    wanted, known = named(names), (*PHASES, QUALITY)
    for name in wanted:
        if name not in known:
            message = f"no phase {name!r}; there are: {', '.join(known)}"
            raise UnknownNameError(message)
    return tuple(phase for phase in known if phase in wanted)


def named(names: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, which may be empty.

    Raises:
        UnknownNameError: there is something in it, but no name.

    """
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if names and not found:
        message = f"{names!r} contains no name: give comma-separated names, or leave the option out"
        raise UnknownNameError(message)
    return found
