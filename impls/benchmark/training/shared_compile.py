"""Suite ``compile``: compiling for a population, each architecture alone or with shared layers.

Caches and the recompile limit belong to a process, so each variant runs in a fresh one with an empty cache.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from esbench.registry import Suite, suite, variant
from esbench.schema import QUALITY, Case
from esbench.workload import QualityMetric, WrongResultError, build
from impls.benchmark.training.architecture_search import (
    COMPILED,
    LEARNING_RATE,
    Search,
    Widths,
    architectures,
    batches,
    check_losses,
    loss_of,
    search_case,
    untrained,
)
from impls.benchmark.training.workload import (
    AbstractTrainingWorkload,
    check_result,
    check_supported,
    quality_metric,
)
from impls.schemes.compiled import missing_compiler_reason
from impls.training.memory_reclaim import call_in_fresh_process
from impls.training.shared_compile import (
    SharedLayers,
    SilentlyEagerError,
    change_settings,
    recompile_limit_settings,
)

OPERATORS = (COMPILED,)

Way = Literal["eager", "whole", "static", "dynamic"]

LIMIT = 1024
"""Number of graphs where the recompile limit is lifted."""
CHECKED = 2
"""Candidates that are checked before anything is measured; the measured process checks all."""
WARM_UP = 2
"""Steps that are not timed."""
TIMED = 20
"""Compiled and eager steps that are timed alternately."""


@variant(mode="base", baseline=True, operators=OPERATORS, source="no compiler")
@dataclass(frozen=True)
class EagerModels:
    """Nothing is compiled."""


@variant(mode="naive", baseline=True, operators=OPERATORS, source="torch.compile(model)")
@variant(operators=OPERATORS, limited=True, source="torch.compile(model), as it is usually called")
@dataclass(frozen=True)
class WholeModel:
    """Each architecture compiled as a whole; ``limited`` keeps torch's own recompile limit."""

    limited: bool = False


@variant(operators=OPERATORS, shapes=("static", "dynamic"), source="ours")
@dataclass(frozen=True)
class SharedLayer:
    """One compiled linear layer for all architectures."""

    shapes: Literal["static", "dynamic"] = "dynamic"


Scheme = EagerModels | WholeModel | SharedLayer


@dataclass(frozen=True)
class Plan:
    """A population to train, and how to compile it."""

    search: Search
    way: Way
    widths: tuple[Widths, ...]
    limit: int | None = None  # maximum number of graphs; None for torch's own
    backend: str = "inductor"
    timed: bool = True


@dataclass(frozen=True)
class Trial:
    """The measurements of a fresh process: the number of graphs, and times of each candidate."""

    graphs: int
    candidate_ns: tuple[float, ...] = ()  # to build and train it
    compile_ns: tuple[float, ...] = ()  # of its training beyond that of warm steps
    step_ns: tuple[float, ...] = ()  # of a warm step
    eager_step_ns: tuple[float, ...] = ()  # of the same step of an eager model
    eager: str = ""  # why nothing is reported, if a model did not run compiled
    wrong: str = ""  # how trained weights differ from the reference


class CompileWorkload(AbstractTrainingWorkload):
    """A population that is compiled; nothing is timed in this process."""

    reason = "compiled code needs its own process and cache: see the metrics of a fresh process"

    def __init__(self, scheme: Scheme, case: Case, device: str, seed: int) -> None:
        """Draw the architectures; raise UnavailableError if there is no compiler for the device."""
        super().__init__(case, device, seed)
        way: Way = "eager"
        if isinstance(scheme, WholeModel):
            way = "whole"
        elif isinstance(scheme, SharedLayer):
            way = scheme.shapes
        reason = "" if way == "eager" else missing_compiler_reason(torch.device(device))
        check_supported(not reason, reason)
        limit = None if scheme == WholeModel(limited=True) else LIMIT
        self._plan = Plan(Search(case, device, seed), way, architectures(case, seed), limit)

    @override
    def verify(self) -> None:
        # The backend "eager" captures graphs without compiling them; measured processes check compiled code.
        widths = self._plan.widths[:CHECKED]
        run_isolated(replace(self._plan, widths=widths, backend="eager", timed=False))

    @override
    def quality(self) -> Iterator[QualityMetric]:
        return quality_metrics(run_isolated(self._plan), self._plan.way)


def run_isolated(plan: Plan) -> Trial:
    """Run a trial in a fresh process with an empty cache; raise WrongResultError if weights are wrong."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        trial = call_in_fresh_process(run_trial, plan, environment=environment)
    check_result(not trial.wrong, trial.wrong)
    return trial


def quality_metrics(trial: Trial, way: Way) -> Iterator[QualityMetric]:
    """Yield the quality metrics of a trial.

    Break-even is the number of training steps, over all candidates, that repay the time for compiling.
    """
    compile_ns = sum(trial.compile_ns)
    saved_ns = statistics.fmean(trial.eager_step_ns or [0]) - statistics.fmean(trial.step_ns or [0])
    reasons = {}
    if way == "eager":
        reasons = dict.fromkeys(("compile_ns", "break_even_steps"), "nothing is compiled")
    elif saved_ns <= 0:
        reasons = {"break_even_steps": "never: a warm step is not faster than an eager one"}
    numbers: dict[str, Sequence[float]] = {
        "graphs_count": [trial.graphs],
        "compile_ns": [compile_ns],
        "candidate_ns": trial.candidate_ns,
        "step_ns": trial.step_ns,
        "eager_step_ns": trial.eager_step_ns,
        "break_even_steps": [compile_ns / (saved_ns or 1)],
    }
    for name, samples in numbers.items():
        yield quality_metric(name, "fresh process and cache", samples, trial.eager or reasons.get(name, ""))


def run_trial(plan: Plan) -> Trial:
    """Train a population in this process, which should be fresh, and measure it."""
    search = plan.search
    shared = SharedLayers(plan.backend, dynamic=plan.way == "dynamic", recompile_limit=plan.limit)
    x = batches(search.case, search.device, search.seed)[0]
    times: list[_Times] = []
    losses: list[Tensor] = []
    for number in range(len(plan.widths)):
        try:
            with change_settings(recompile_limit_settings(plan.limit)):
                candidate_losses, candidate_times = _train_candidate(plan, number, shared, x)
        except SilentlyEagerError as error:
            message = f"candidate {number} of {len(plan.widths)}: {error}"
            return Trial(shared.graphs.compiled, eager=message)
        losses.append(candidate_losses)
        times.append(candidate_times)
    try:
        check_losses(search, plan.widths, losses, x)
    except WrongResultError as error:
        return Trial(shared.graphs.compiled, wrong=str(error))
    candidate_ns, compile_ns, step_ns, eager_step_ns = zip(*times, strict=True)
    return Trial(shared.graphs.compiled, candidate_ns, compile_ns, step_ns, eager_step_ns)


class _Times(NamedTuple):
    """The times of one candidate, see :class:`Trial`."""

    candidate_ns: float
    compile_ns: float
    step_ns: float
    eager_step_ns: float


def _train_candidate(plan: Plan, number: int, shared: SharedLayers, x: Tensor) -> tuple[Tensor, _Times]:
    """Train a candidate on batches x; return its losses [steps] and its times."""
    search, widths, graphs = plan.search, plan.widths[number], shared.graphs
    start_ns = time.perf_counter_ns()
    plain = untrained(widths, search.case, search.device, search.seed + number)
    model: nn.Module = plain
    if plan.way == "whole":
        model = cast("nn.Module", torch.compile(plain, backend=graphs))
    elif plan.way != "eager":
        shared.replace(model)
    step = _TrainingStep(plain, model, search.device)
    training_ns = sum(step.measure(rows) for rows in x)
    candidate_ns = float(time.perf_counter_ns() - start_ns)
    losses = torch.stack(step.losses)
    if plan.way != "eager":
        graphs.check(model, [x[0]], 1 if plan.way == "whole" else len(widths) - 1)
    warm_ns = eager_ns = 0.0
    if plan.timed:
        eager = untrained(widths, search.case, search.device, search.seed)
        eager_step = _TrainingStep(eager, eager, search.device)
        pairs = [(step.measure(x[0]), eager_step.measure(x[0])) for _ in range(WARM_UP + TIMED)]
        warm_ns, eager_ns = map(statistics.median, zip(*pairs[WARM_UP:], strict=True))
    compile_ns = max(0.0, training_ns - len(x) * warm_ns)
    return losses, _Times(candidate_ns, compile_ns, warm_ns, eager_ns)


class _TrainingStep:
    """Training steps with SGD of ``model``, which may be the compiled form of ``plain``."""

    def __init__(self, plain: nn.Module, model: nn.Module, device: str) -> None:
        self.losses: list[Tensor] = []
        self._model, self._device = model, device
        self._optimizer = SGD(plain.parameters(), lr=LEARNING_RATE)

    def measure(self, rows: Tensor) -> float:
        """Take a step; return its time in nanoseconds."""
        start_ns = time.perf_counter_ns()
        self._optimizer.zero_grad()
        loss = loss_of(self._model(rows), rows)
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.detach())
        if self._device.startswith("cuda"):
            torch.cuda.synchronize()
        return float(time.perf_counter_ns() - start_ns)


for scheme_class in (EagerModels, WholeModel, SharedLayer):
    build.register(scheme_class, CompileWorkload)

CHECKS = (search_case(2, 5, 4, "float64", COMPILED),)
"""For the suite ``check``."""

suite(
    Suite(
        name="compile",
        description="compiling for a population: 12 MLPs of up to 3 x 1024 channels; minutes on a CPU",
        cases=(search_case(12, 256, 64, operator=COMPILED),),
        variants=("EagerModels", "WholeModel*", "SharedLayer*"),
        phases=(QUALITY,),
        active=(),
        limit_s=600.0,
    )
)
