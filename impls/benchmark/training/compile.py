"""Compiling for a population as something to measure: every architecture anew, or layers that all share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from msgspec.structs import replace
from torch import Tensor
from typing_extensions import override

from esbench.registry import (
    Figure,
    Suite,
    UnavailableError,
    Workload,
    WrongResultError,
    build,
    suite,
    variant,
)
from esbench.schema import PHASES, QUALITY, Case, Phase, Work
from impls.benchmark.training.candidates import COMPILED, architectures, population
from impls.benchmark.training.compile_trial import Plan, Trial, Way, ask
from impls.training import compile as compiling

OPERATORS = (COMPILED,)

LIMIT = 1024
"""Of graphs, where the recompile limit is lifted."""

WITNESSES = 2
"""So many candidates are held to the truth before anything is measured; in the measured process all are."""

NOTHING = "nothing is compiled"
FRESH = "fresh process and cache"
ELSEWHERE = "compiled code needs a process and a cache of its own: see the figures of a fresh one"


@dataclass(frozen=True)
class AbstractCompilation(ABC):
    """A way to compile the models of a population."""

    @property
    @abstractmethod
    def way(self) -> Way:
        """How it is done."""

    @property
    @abstractmethod
    def limit(self) -> int | None:
        """The recompile limit; None for torch's own."""


@variant(mode="base", baseline=True, operators=OPERATORS, source="no compiler")
@dataclass(frozen=True)
class EagerModels(AbstractCompilation):
    """Nothing is compiled."""

    @property
    @override
    def way(self) -> Way:
        return "eager"

    @property
    @override
    def limit(self) -> int | None:
        return None


@variant(mode="naive", baseline=True, operators=OPERATORS, source="torch.compile(model)")
@variant(operators=OPERATORS, limited=True, source="torch.compile(model), as it is usually called")
@dataclass(frozen=True)
class WholeModel(AbstractCompilation):
    """Each architecture compiled as a whole; ``limited`` by the recompile limit that torch sets."""

    limited: bool = False

    @property
    @override
    def way(self) -> Way:
        return "whole"

    @property
    @override
    def limit(self) -> int | None:
        return None if self.limited else LIMIT


@variant(operators=OPERATORS, shapes=("static", "dynamic"), source="ours")
@dataclass(frozen=True)
class SharedLayer(AbstractCompilation):
    """One compiled linear layer for all architectures."""

    shapes: Literal["static", "dynamic"] = "dynamic"

    @property
    @override
    def way(self) -> Way:
        return self.shapes

    @property
    @override
    def limit(self) -> int | None:
        return LIMIT


class CompileWorkload(Workload):
    """A population that is compiled; nothing of it is timed in this process."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()
    phases: Mapping[Phase, Callable[[], object]] = {}
    unavailable: Mapping[Phase, str] = dict.fromkeys(PHASES, ELSEWHERE)

    def __init__(self, scheme: AbstractCompilation, case: Case, device: str, seed: int) -> None:
        """Draw the architectures.

        Raises:
            UnavailableError: there is no compiler for the device.

        """
        reason = compiling.refusal(device)
        if reason and scheme.way != "eager":
            raise UnavailableError(reason)
        self._plan = Plan(
            case=case,
            device=device,
            seed=seed,
            way=scheme.way,
            widths=architectures(case, seed),
            threads=torch.get_num_threads(),
            limit=scheme.limit,
        )

    @override
    def work(self, phase: Phase) -> Work | None:
        return None

    @override
    def enter(self, phase: Phase) -> None:
        """Hold nothing."""

    @override
    def verify(self) -> None:
        # As graphs, but without code of their own: what is compiled is checked where it is measured.
        widths = self._plan.widths[:WITNESSES]
        _checked(ask(replace(self._plan, widths=widths, backend="eager", timed=False)))

    @override
    def confirm(self, phase: Phase) -> None:
        """Confirm nothing: no phase is timed."""

    @override
    def quality(self) -> Iterator[Figure]:
        return figures(_checked(ask(self._plan)), self._plan.way)


def figures(found: Trial, way: Way) -> Iterator[Figure]:
    """Yield what a fresh process found: totals of the population, and what a candidate takes.

    Break-even is in training steps, over all candidates together: so many pay the compiling back.
    """
    names = ("graphs_count", "compile_ns", "candidate_ns", "step_ns", "eager_step_ns", "break_even_steps")
    if found.eager:
        yield from (Figure(name, FRESH, reason=found.eager) for name in names)
        return
    yield Figure("graphs_count", FRESH, (float(found.graphs),))
    if way == "eager":
        yield Figure("compile_ns", FRESH, reason=NOTHING)
    else:
        yield Figure("compile_ns", FRESH, (sum(found.compile_ns),))
    yield Figure("candidate_ns", FRESH, found.candidate_ns)
    yield Figure("step_ns", FRESH, found.step_ns)
    yield Figure("eager_step_ns", FRESH, found.eager_step_ns)
    saved_ns = fmean(found.eager_step_ns) - fmean(found.step_ns)
    if way == "eager":
        yield Figure("break_even_steps", FRESH, reason=NOTHING)
    elif saved_ns <= 0:
        yield Figure("break_even_steps", FRESH, reason="never: a warm step takes no less than an eager one")
    else:
        yield Figure("break_even_steps", FRESH, (sum(found.compile_ns) / saved_ns,))


def _checked(found: Trial) -> Trial:
    """Return what was found.

    Raises:
        WrongResultError: it is not what was written out.

    """
    if found.wrong:
        raise WrongResultError(found.wrong)
    return found


@build.register(AbstractCompilation)
def _compilation(scheme: AbstractCompilation, case: Case, device: str, seed: int) -> Workload:
    return CompileWorkload(scheme, case, device, seed)


CHECKS = (population(2, 5, 4, "float64", COMPILED),)
"""For the suite ``check``."""

suite(
    Suite(
        name="compile",
        description="compiling for a population: 12 MLPs of up to 3 x 1024 channels; minutes on a CPU",
        cases=(population(12, 256, 64, operator=COMPILED),),
        variants=("EagerModels", "WholeModel*", "SharedLayer*"),
        phases=(QUALITY,),
        active=(),
    )
)
