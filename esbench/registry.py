"""Variants and suites: registration, loading of their packages, and selection by name.

A package of variants registers with :func:`variant` and :func:`suite`, and extends the functions of
:mod:`esbench.workload` for its schemes. The harness imports such a package only by
:func:`load`, given a module name, a file or an entry point.
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
from pathlib import Path
from typing import TypeVar, cast, get_args

import msgspec

from esbench.errors import UserError, message_line, message_of
from esbench.schema import DENSE, PHASES, QUALITY, Case, Mode, Phase, Scalar, SchemeDoc, Variant
from esbench.text import suggest

Scheme = TypeVar("Scheme", bound=type)

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16")
ENTRY_POINTS = "esbench.variants"
DEFAULT = "impls"
"""The package that is always loaded."""
LOADED: dict[str, str] = {}
"""Name given to :func:`load` -> its package; a package registers once in a process."""


class UnknownNameError(UserError):
    """A name or glob that matches nothing; the message has known names."""


# Registration


@dataclasses.dataclass(frozen=True)
class Entry:
    """A registered variant: its record, its scheme, and its origin.

    ``on_request``: the set-up takes long; the variant is measured only if a suite or an option names it.
    """

    variant: Variant
    scheme: object
    source: str
    package: str
    operators: tuple[str, ...] | None = None
    on_request: bool = False
    reserved: Collection[str] = dataclasses.field(default=(), compare=False, repr=False)

    def supports(self, case: Case) -> bool:
        """Return whether the variant supports the case's operator.

        By default it supports all operators but those of its package's other workloads (``reserved``).
        """
        if self.operators is None:
            return case.operator not in self.reserved
        return case.operator in self.operators


@dataclasses.dataclass(frozen=True)
class Suite:
    """A set of variants and cases that are measured together.

    Attributes:
        name: for ``--suite``.
        description: one line.
        variants: globs, see :meth:`Registry.select`; packages given as plug-ins are measured in any suite.
        phases: the phases to measure.
        cell_s: limit for the seconds spent on one (case, variant, phase).
        sweep: the field of a case that grows from case to case.
        stop_s: in a sweep, a variant that takes longer than this on a case, or is out of memory, is not
            measured on larger cases.
        active: globs over case labels; utilization, power and energy of a GPU are read on these cases, which
            takes some seconds each.
        active_variants: globs over names of variants, for the same purpose.
        methods: phase -> the methods by which it is timed on a GPU; by default all.
        traced: the phases whose launches are counted and whose streams are checked on a GPU.
        limit_s: a variant that makes no progress for this many seconds is ended; a slow call needs more.
        timed: globs over names of cells whose times a gate compares; it compares bytes and outputs of all.
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
    limit_s: float = 60.0
    timed: tuple[str, ...] = ("*",)


LONGEST_NAME = 120
"""The most characters of a variant's name, with its options: tables and lines have to show it."""


class Registry:
    """Variants and suites by name."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.suites: dict[str, Suite] = {}
        self.reserved: set[str] = set()

    def reserve(self, *operators: str) -> tuple[str, ...]:
        """Reserve operators for variants that name them in ``operators``; return the operators."""
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

        Returns the class unchanged, so that decorators can be stacked.

        Raises:
            ValueError: the mode is unknown, the name is too long, or a variant of that name, or another base
                or naive of the same operators, is registered already.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode {mode!r} is unknown: use {', '.join(get_args(Mode))}")

        def register(scheme: Scheme) -> Scheme:
            values = [value if isinstance(value, tuple) else (value,) for value in grid.values()]
            for combination in itertools.product(*values):
                instance = scheme(**dict(zip(grid, combination, strict=True)))
                options = changed_options(instance)
                record = Variant(scheme=scheme.__name__, options=options, mode=mode, baseline=baseline)
                if len(record.name) > LONGEST_NAME:
                    raise ValueError(
                        f"variant {record.name[:20]}... has a name of {len(record.name)} characters: use at "
                        f"most {LONGEST_NAME}"
                    )
                if other := self.entries.get(record.name):
                    packages = f"by {other.package} and by {scheme.__module__}"
                    raise ValueError(f"variant {record.name} is registered twice: {packages}")
                if mode != "batched" and (other := self._reference(mode, operators)):
                    names = f"{record.name} and {other.variant.name}"
                    raise ValueError(
                        f"{names} are both {mode}: use mode='batched', or reserve other operators"
                    )
                self.entries[record.name] = Entry(
                    variant=record,
                    scheme=instance,
                    source=message_line(str(source)),
                    package=scheme.__module__.partition(".")[0],
                    operators=operators,
                    on_request=on_request,
                    reserved=self.reserved,
                )
            return scheme

        return register

    def _reference(self, mode: Mode, operators: tuple[str, ...] | None) -> Entry | None:
        """Return the base or naive that is registered for one of these operators, None if there is none.

        Operators that are not reserved share one base and one naive.
        """

        def reserved_or_empty(names: tuple[str, ...] | None) -> set[str]:
            return {name if name in self.reserved else "" for name in names or ("",)}

        wanted = reserved_or_empty(operators)
        of_mode = (entry for entry in self.entries.values() if entry.variant.mode == mode)
        return next((entry for entry in of_mode if wanted & reserved_or_empty(entry.operators)), None)

    def suite(self, suite: Suite) -> Suite:
        """Register a suite; raise a ValueError if its name is taken."""
        if suite.name in self.suites:
            raise ValueError(f"suite {suite.name} is registered twice")
        self.suites[suite.name] = suite
        return suite

    @property
    def check_cases(self) -> tuple[Case, ...]:
        """The cases of the suite ``check``, on which variants are compared in float64; empty without it."""
        return self.suites["check"].cases if "check" in self.suites else ()

    def find_suite(self, name: str) -> Suite:
        """Return a suite by its name; raise an UnknownNameError if it is not registered."""
        if name not in self.suites:
            raise UnknownNameError(f"no suite {name!r}; {suggest(name, sorted(self.suites), 'esbench list')}")
        return self.suites[name]

    def select(self, globs: Iterable[str] = ("*",)) -> list[Entry]:
        """Return the entries whose name, or label on an operator that they support, matches one of the globs.

        A glob after ``!`` removes entries that earlier globs chose: ``("*", "!Fused*")``. Entries are in the
        order of registration, baselines last.

        Raises:
            UnknownNameError: a glob matches nothing.
        """
        cases = {case.operator: case for suite in self.suites.values() for case in suite.cases}.values()
        labels = {
            name: {name, *(entry.variant.label(case.operator) for case in cases if entry.supports(case))}
            for name, entry in self.entries.items()
        }
        chosen: set[str] = set()
        for glob in globs:
            pattern = glob.removeprefix("!")
            matching = {
                name
                for name, labels_of_entry in labels.items()
                if any(fnmatch.fnmatchcase(label, pattern) for label in labels_of_entry)
            }
            if not matching:
                listing = "esbench list --variants '*'"
                raise UnknownNameError(
                    f"no variant matches {pattern!r}; {suggest(pattern, [*self.entries], listing)}"
                )
            chosen = chosen - matching if glob.startswith("!") else chosen | matching
        entries = [entry for name, entry in self.entries.items() if name in chosen]
        return sorted(entries, key=lambda entry: entry.variant.baseline)


REGISTRY = Registry()
variant = REGISTRY.variant
suite = REGISTRY.suite


def changed_options(instance: object) -> tuple[tuple[str, Scalar], ...]:
    """Return the fields of a dataclass instance that differ from their default; 1 and 1.0 differ."""
    if not dataclasses.is_dataclass(instance):
        return ()
    return tuple(
        (field.name, storable_option(value))
        for field in dataclasses.fields(instance)
        if (value := getattr(instance, field.name)) != field.default or type(value) is not type(field.default)
    )


def storable_option(value: object) -> Scalar:
    """Return an option as it is stored: a bool, text, integer or finite float; other values as text."""
    try:
        read = msgspec.json.decode(msgspec.json.encode(value), type=Scalar)
        if type(read) is type(value) and read == value:
            return cast("Scalar", value)
    except (TypeError, ValueError, RecursionError):
        pass
    return message_line(str(value))


def scheme_docs(entries: Iterable[Entry]) -> dict[str, SchemeDoc]:
    """Return the docstring of each scheme among registered variants, by the scheme's name."""
    docs = {}
    for entry in entries:
        kind = type(entry.scheme)
        is_exported = getattr(sys.modules.get(entry.package), kind.__name__, None) is kind
        module = entry.package if is_exported else kind.__module__
        docs[entry.variant.scheme] = SchemeDoc(module=module, text=inspect.cleandoc(kind.__doc__ or ""))
    return docs


# Loading


def load(name: str) -> str:
    """Import a package of variants by module name or by file, once; return the name of the package.

    Raises:
        UserError: it cannot be found or raises when imported.
    """
    if name not in LOADED:
        try:
            if name.endswith(".py"):
                LOADED[name] = _import_file(Path(name))
            else:
                LOADED[name] = importlib.import_module(name).__name__.partition(".")[0]
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code may raise anything
            reason = f"{type(error).__name__}: {message_of(error)}"
            raise UserError(f"cannot load variants from {name or repr(name)}: {reason}") from error
    return LOADED[name]


def load_installed() -> None:
    """Load the default package and every package that declares the entry point."""
    for name in installed_packages():
        load(name)


def installed_packages() -> list[str]:
    """Return the names of the default package and of every package that declares the entry point."""
    points = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return [*dict.fromkeys([DEFAULT, *(point.module for point in points)])]


def _import_file(path: Path) -> str:
    """Import a file as a module of its name; return the name."""
    if not path.is_file():
        raise FileNotFoundError("no such file")
    if path.stem in sys.modules:
        raise ImportError(f"a module {path.stem} is loaded already; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # noqa: S101  # its name ends in .py
    assert spec.loader is not None  # noqa: S101  # the same
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    registered = len(REGISTRY.entries), len(REGISTRY.suites)
    try:
        spec.loader.exec_module(module)
    except BaseException:  # raised again, without a partly imported module
        del sys.modules[path.stem]
        raise
    if (len(REGISTRY.entries), len(REGISTRY.suites)) == registered:
        del sys.modules[path.stem]
        raise ImportError("it registers nothing: put @variant() above the class of a scheme")
    return path.stem


# Choosing what to measure


def with_references(entries: Sequence[Entry]) -> list[Entry]:
    """Add base, naive and dense noise, the references of every multiplier."""
    chosen = {entry.variant for entry in entries}
    return [entry for entry in REGISTRY.select() if entry.variant in chosen or is_reference(entry.variant)]


def is_reference(variant: Variant) -> bool:
    """Return whether other variants are compared with this one: base, naive or dense noise."""
    return variant.mode != "batched" or variant.name == DENSE


def candidates(entries: Sequence[Entry], *, named: bool) -> list[Entry]:
    """Return the variants that can be recommended for a layer, and base for comparison.

    Baselines are included only if the user ``named`` them.
    """
    chosen = {
        entry.variant
        for entry in entries
        if entry.variant.mode == "batched" and (named or not entry.variant.baseline)
    }

    def is_for_layers(entry: Entry) -> bool:
        """Return whether not all of the variant's operators are reserved for other workloads."""
        return entry.operators is None or not REGISTRY.reserved.issuperset(entry.operators)

    return [
        entry
        for entry in REGISTRY.select()
        if is_for_layers(entry) and (entry.variant in chosen or entry.variant.mode == "base")
    ]


def suite_of_shapes(name: str, cases: tuple[Case, ...]) -> Suite:
    """Return a suite of these cases with the phases that a ranking by n_eff per ms needs."""
    return Suite(
        name=name,
        description="cases given by shape",
        cases=cases,
        phases=("sample", "forward", "step", QUALITY),
        cell_s=0.3,
        active=(),
        limit_s=300.0,
    )


def entries_of_suite(entries: Sequence[Entry], suite: Suite, plugins: Collection[str]) -> list[Entry]:
    """Return the suite's variants, and all that plug-in packages registered."""
    chosen = {entry.variant for entry in REGISTRY.select(suite.variants)}
    return [entry for entry in entries if entry.variant in chosen or entry.package in plugins]


def cases_of(suite: Suite, glob: str, dtype: str | None) -> tuple[Case, ...]:
    """Return the suite's cases that match the glob, converted to the dtype if one is given.

    Raises:
        UnknownNameError: no case matches, or the dtype is unknown.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError(f"no dtype {dtype!r}; available: {', '.join(DTYPES)}")
    cases = select_cases(suite.cases, glob)
    return tuple(msgspec.structs.replace(case, dtype=dtype) for case in cases) if dtype else cases


def select_cases(cases: Sequence[Case], glob: str) -> tuple[Case, ...]:
    """Return the cases whose label matches the glob; raise an UnknownNameError if none does."""
    chosen = tuple(case for case in cases if fnmatch.fnmatchcase(case.label, glob))
    if not chosen:
        known = [case.label for case in cases]
        raise UnknownNameError(f"no case matches {glob!r}; {suggest(glob, known, 'esbench list --json')}")
    return chosen


def parse_phases(names: str) -> tuple[Phase, ...]:
    """Return the phases named in a comma-separated list, in the order of a step; quality comes last.

    Raises:
        UnknownNameError: a phase is unknown.
    """
    chosen, known = split_names(names), (*PHASES, QUALITY)
    for name in chosen:
        if name not in known:
            raise UnknownNameError(f"no phase {name!r}; available: {', '.join(known)}")
    return tuple(phase for phase in known if phase in chosen)


def split_names(names: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list; raise a UserError if a text that is not empty has none."""
    stripped = tuple(name.strip() for name in names.split(",") if name.strip())
    if names and not stripped:
        raise UserError(f"{names!r} contains no name: give comma-separated names, or leave the option out")
    return stripped
