"""A population that is compiled in a fresh process: ``python -m`` of this module answers a question.

Caches of one way to compile would serve the next, and so would the recompile limit be shared: each way has a
process and an empty cache of its own.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import SGD

from esbench.registry import WrongResultError
from esbench.schema import Case
from impls.benchmark.training.candidates import (
    LEARNING_RATE,
    Widths,
    batches,
    loss_of,
    untrained,
    written_out,
)
from impls.training import isolation
from impls.training.compile import SharedLayers, SilentlyEagerError, WholeModels
from impls.verify import reference

Way = Literal["eager", "whole", "static", "dynamic"]

LAST = 2
"""A candidate's first steps compile, forward and backward; of its last ones this many pairs are warm."""

WARM = 20
"""Pairs of a compiled and an eager step that are timed, one beside the other."""


class Plan(msgspec.Struct, frozen=True):
    """What is compiled, and how. ``limit`` is the recompile limit, None where it is torch's own."""

    case: Case
    device: str
    seed: int
    way: Way
    widths: tuple[Widths, ...]
    threads: int
    limit: int | None = None
    backend: str = "inductor"
    timed: bool = True


class Trial(msgspec.Struct, frozen=True):
    """What a fresh process found: for each candidate in order, but for the number of graphs.

    ``compile_ns`` is what the first steps took beyond warm ones. ``eager`` says why nothing may be reported,
    ``wrong`` what came out otherwise than written out.
    """

    graphs: int
    candidate_ns: tuple[float, ...] = ()
    compile_ns: tuple[float, ...] = ()
    step_ns: tuple[float, ...] = ()
    eager_step_ns: tuple[float, ...] = ()
    eager: str = ""
    wrong: str = ""


def trial(plan: Plan) -> Trial:
    """Train a population in this process, which should be fresh."""
    compile_, check, graphs = _way(plan)
    x = batches(plan.case, plan.device, plan.seed)[0]
    found: list[tuple[float, float, float, float]] = []
    eager: list[str] = []
    for number, widths in enumerate(plan.widths):
        start_ns = time.perf_counter_ns()
        plain = untrained(widths, plan.case, plan.device, plan.seed + number)
        model = compile_(plain)
        optimizer = SGD(plain.parameters(), lr=LEARNING_RATE)
        try:
            taken = [_timed(partial(_step, model, optimizer, rows, plan), plan.device) for rows in x]
        except SilentlyEagerError as error:  # neither shared layers nor whole models run eager
            return Trial(graphs(), eager=f"candidate {number} of {len(plan.widths)}: {error}")
        candidate_ns = float(time.perf_counter_ns() - start_ns)
        try:
            _check(number, widths, plain, x, plan)
        except WrongResultError as error:
            return Trial(graphs(), wrong=str(error))
        try:
            check(model, x[0])
        except SilentlyEagerError as error:
            eager.append(str(error))
        warm_ns, plain_ns = _pairs(model, plain, optimizer, x[0], plan) if plan.timed else (0.0, 0.0)
        found.append((candidate_ns, max(0.0, sum(taken) - len(taken) * warm_ns), warm_ns, plain_ns))
    said = f"{len(eager)} of {len(plan.widths)} models did not run compiled: {eager[0]}" if eager else ""
    candidates, compiling, steps, plain_steps = zip(*found, strict=True)
    return Trial(graphs(), candidates, compiling, steps, plain_steps, said)


def ask(plan: Plan) -> Trial:
    """Have a fresh process with an empty cache compile and train a population.

    Raises:
        IsolationError: it could not.

    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}
        return isolation.answer(__name__, plan, environment, Trial)


def _way(
    plan: Plan,
) -> tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module, Tensor], None], Callable[[], int]]:
    """Return what compiles a model, what checks that it is, and how many graphs there are."""
    if plan.way == "eager":
        return lambda model: model, lambda _, __: None, lambda: 0
    if plan.way == "whole":
        whole = WholeModels(plan.backend, recompile_limit=plan.limit)
        return whole.compile, whole.check, lambda: whole.graphs.compiled
    shared = SharedLayers(plan.backend, dynamic=plan.way == "dynamic", recompile_limit=plan.limit)
    return shared.replace, shared.check, lambda: shared.graphs.compiled


def _pairs(
    model: nn.Module, plain: nn.Module, optimizer: SGD, rows: Tensor, plan: Plan
) -> tuple[float, float]:
    """Return the median nanoseconds of a warm step and of an eager one, taken in turn."""
    eager = untrained(_widths(plain), plan.case, plan.device, plan.seed)
    own = SGD(eager.parameters(), lr=LEARNING_RATE)
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARM + LAST):
        taken[0].append(_timed(partial(_step, model, optimizer, rows, plan), plan.device))
        taken[1].append(_timed(partial(_step, eager, own, rows, plan), plan.device))
    return statistics.median(taken[0][LAST:]), statistics.median(taken[1][LAST:])


def _widths(model: nn.Module) -> Widths:
    weights = [one for one in model.parameters() if one.ndim > 1]
    return (weights[0].shape[1], *(one.shape[0] for one in weights))


def _step(model: nn.Module, optimizer: SGD, rows: Tensor, plan: Plan) -> None:
    optimizer.zero_grad()
    loss_of(model, rows, plan.case).backward()
    optimizer.step()


def _timed(call: Callable[[], object], device: str) -> float:
    start_ns = time.perf_counter_ns()
    call()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return float(time.perf_counter_ns() - start_ns)


def _check(number: int, widths: Widths, trained: nn.Module, x: Sequence[Tensor] | Tensor, plan: Plan) -> None:
    """Hold a trained model to the same training written out.

    Raises:
        WrongResultError: its weights are others.

    """
    first = [
        one.detach() for one in untrained(widths, plan.case, plan.device, plan.seed + number).parameters()
    ]
    written = []
    for wide in (False, True):
        values = [one.double() if wide else one for one in first]
        _, weights, biases = written_out(
            values[::2], values[1::2], [rows.double() if wide else rows for rows in x], plan.case
        )
        written.append([one for pair in zip(weights, biases, strict=True) for one in pair])
    for got, slow, right in zip(trained.parameters(), *written, strict=True):
        reference.compare(f"weights of candidate {number}", got.detach(), right, slow)


def _main() -> None:
    plan = isolation.asked(Plan)
    torch.set_num_threads(plan.threads)
    isolation.reply(trial(plan))


if __name__ == "__main__":
    _main()
