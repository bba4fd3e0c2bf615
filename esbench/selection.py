"""What a run measures, chosen by name: variants, cases and phases."""

import fnmatch
from collections.abc import Collection, Iterable, Sequence

import msgspec

from esbench.registry import REGISTRY, Entry, Suite, UnknownNameError
from esbench.schema import PHASES, QUALITY, Case, Phase

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16")


def with_references(entries: Sequence[Entry]) -> list[Entry]:
    """Add what every multiplier is taken against: base and naive."""
    chosen = {entry.variant for entry in entries}
    return [e for e in REGISTRY.select() if e.variant in chosen or e.variant.mode != "batched"]


def candidates(entries: Sequence[Entry], *, named: bool) -> list[Entry]:
    """Return what can be recommended for a layer, and base, which it is compared with.

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
    """Return a suite of these cases alone, with what a ranking by effective members per millisecond needs."""
    return Suite(
        name=name,
        description="cases that were asked for by shape",
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
    """Return the suite's cases that match, in the type asked for.

    Raises:
        UnknownNameError: no case matches, or there is no such type.

    """
    if dtype is not None and dtype not in DTYPES:
        message = f"no dtype {dtype!r}; there are: {', '.join(DTYPES)}"
        raise UnknownNameError(message)
    chosen = select_cases(suite.cases, glob)
    return tuple(msgspec.structs.replace(case, dtype=dtype) for case in chosen) if dtype else chosen


def select_cases(cases: Iterable[Case], glob: str) -> tuple[Case, ...]:
    """Cases whose label matches the glob.

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
    """Return the names in a comma-separated list; nothing stands for no choice.

    Raises:
        UnknownNameError: there is something in it, but no name.

    """
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    if names and not found:
        message = f"{names!r} names nothing: give names with commas between them, or leave the option out"
        raise UnknownNameError(message)
    return found
