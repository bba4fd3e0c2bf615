"""What a variant might do to look faster than it is, and how each of it is found.

Before a phase is timed its call is made twice, on different inputs; when everything has been measured it
is held to the slow truth on inputs that it has not seen, under the conditions in which it was timed. Honest
calls give finite results, different ones for different inputs, which stay as they are once they were
returned; they hold no more memory from call to call, and work on the stream on which they were called.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Generator

from esbench.measure import timers
from esbench.measure.memory import Footprint
from esbench.measure.oracle import tensors
from esbench.measure.profiler import Trace
from esbench.measure.stopwatch import Stopwatch
from esbench.registry import Workload, WrongResultError
from esbench.schema import Phase

PATIENCE_S = (0.003, 0.03)
"""Late writing is looked for after the time of one more call, within these bounds."""

PIECE = 2**22
"""Tensors are read in pieces of so many elements: no large copy of an output is ever made."""

PROBES = 256
"""So many numbers of a tensor are kept: two tensors of one sum and norm differ in them."""

DRAWS = 64
"""Of noise of a single bit so many draws are never all alike."""

DRAWING = frozenset[Phase]({"sample", "step"})
"""Phases that draw noise, of another step at each call."""

Prints = tuple["Print", ...]


class Print(NamedTuple):
    """What tells one tensor from another: its sum, its norm and some of its numbers, in float64."""

    numbers: int
    total: float
    norm: float
    probes: tuple[float, ...]

    def resembles(self, other: "Print", share: float) -> bool:
        """Say whether two differ by no more than rounding, as a share of the norm."""
        if self.numbers != other.numbers or not abs(self.norm - other.norm) <= share * other.norm:
            return False
        return math.dist(self.probes, other.probes) <= share * max(math.hypot(*other.probes), _TINY)


def prints(result: object) -> Prints:
    """Read every tensor of a result once."""
    return tuple(_print(tensor) for tensor in tensors(result))


def rehearse(workload: Workload, phase: Phase, synchronize: Callable[[], object], watch: Stopwatch) -> Prints:
    """Call twice in a phase that was just entered; return the prints of the first result.

    No two results are held at once: memory may have room for one. The calls are the first of the warm-up.

    Raises:
        WrongResultError: a result is not finite, changes once it was returned, or is that of other inputs.

    """

    def call() -> object:
        with watch.on("warm-up"):
            return workload.phases[phase]()

    first = _patient_prints(call, phase, synchronize)
    second = prints(call())
    check_finite(second, phase)
    inputs_differ = len(workload.inputs) > 1 or phase == "sample"
    if first and inputs_differ and first == second and not _may_agree(workload, phase, call, first):
        message = f"{phase} gives the same for other inputs: it returns an earlier result"
        raise WrongResultError(message)
    return first


def _may_agree(workload: Workload, phase: Phase, call: Callable[[], object], seen: Prints) -> bool:
    """Whether results that agree may be honest, as those of a single bit or of noise that drops every input.

    Of what draws noise, other draws must differ soon. The rest is held to the slow truth at once, for which a
    workload writes inputs of its own; one that leaves its inputs as they are has asked nobody.
    """
    if phase in DRAWING:
        return any(prints(call()) != seen for _ in range(DRAWS))
    with _other_numbers(workload.inputs):
        before = prints(workload.inputs)
        try:
            workload.confirm(phase)
        except WrongResultError:
            return False
        is_asked = prints(workload.inputs) != before
    workload.enter(phase)
    return is_asked


def confirm(workload: Workload, phase: Phase, before: Prints) -> None:
    """Hold a call that was timed to the slow truth, under the conditions in which it was timed.

    Of noise there is no other truth than that the same step gives the same again.

    Raises:
        WrongResultError: it gives something else now.

    """
    workload.enter(phase)
    with timers.quiet():
        seen = prints(workload.phases[phase]())
        check_finite(seen, phase)
        if phase == "sample" and not _alike(seen, before):
            message = "sample gives something else after it was timed than before, for the same step"
            raise WrongResultError(message)
        try:
            workload.confirm(phase)
        except WrongResultError as error:
            message = f"{error}; this was after it was timed, on inputs that it had not seen"
            raise WrongResultError(message) from error


def check_replay(workload: Workload, phase: Phase, replay: Callable[[], object]) -> None:
    """Compare a replayed graph with the call it was captured from, on inputs neither has seen.

    Both are at the first turn when they come here. Where the phase draws noise, both begin at the first step
    and take each turn twice, the second time at a later step.

    Raises:
        WrongResultError: the replay skips work, or draws the noise of one step again and again.

    """
    turns, draws = max(1, len(workload.inputs)), phase in DRAWING

    def results(call: Callable[[], object]) -> list[Prints]:
        if draws:
            workload.enter(phase)
        return [prints(call()) for _ in range(2 * turns if draws else turns)]

    with _other_numbers(workload.inputs):
        called, replayed = results(workload.phases[phase]), results(replay)
    for turn in range(turns if draws else 0):
        changes = not _alike(called[turn], called[turn + turns])
        if changes and _alike(replayed[turn], replayed[turn + turns]):
            message = (
                f"{phase} replayed from a graph draws the same noise each time: the capture froze its step"
            )
            raise WrongResultError(message)
    for seen, honest in zip(replayed, called, strict=True):
        check_finite(seen, f"{phase} replayed")
        if not _alike(seen, honest):
            message = f"{phase} replayed from a graph gives something else than called: the graph skips work"
            raise WrongResultError(message)


def check_finite(seen: Prints, what: str) -> None:
    """Look through the prints of a result.

    Raises:
        WrongResultError: a tensor holds a NaN or an infinity.

    """
    if not all(math.isfinite(one.total) and math.isfinite(one.norm) for one in seen):
        message = f"{what} gives values that are not finite"
        raise WrongResultError(message)


def check_memory(footprint: Footprint, phase: Phase) -> None:
    """Look whether memory is handed from call to call.

    Raises:
        WrongResultError: a call keeps more than the one before.

    """
    if footprint.kept_bytes > 0:
        message = f"{phase} holds {footprint.kept_bytes} bytes more after every call"
        raise WrongResultError(message)


def check_streams(trace: Trace, phase: Phase) -> None:
    """Look whether all the work is done where it is timed.

    Raises:
        WrongResultError: some of it is not.

    """
    if trace.other_streams:
        streams = ", ".join(map(str, trace.other_streams))
        message = f"{phase} works on another stream ({streams}), where it is not timed"
        raise WrongResultError(message)


def waiting(trace: Trace) -> tuple[str, ...]:
    """Return a label for a call that waits for the device: launches cannot run ahead of it."""
    names = ", ".join(dict.fromkeys(trace.waits))
    return (f"synchronises inside: {names}, {len(trace.waits)} times a call",) if trace.waits else ()


_ROUNDING = 0.02
"""How far results of one call may lie apart: sums in another order, in the narrowest type."""
_TINY = 1e-300


def _patient_prints(call: Callable[[], object], phase: Phase, synchronize: Callable[[], object]) -> Prints:
    start_s = time.monotonic()
    result = call()
    called_s = time.monotonic() - start_s
    seen = prints(result)
    check_finite(seen, phase)
    least_s, most_s = PATIENCE_S
    time.sleep(min(max(called_s, least_s), most_s))
    synchronize()
    if prints(result) != seen:
        message = f"{phase} returned before its result was written: it changed afterwards"
        raise WrongResultError(message)
    return seen


@contextlib.contextmanager
def _other_numbers(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put other seeded numbers into the inputs, and the right ones back; rows of no numbers change places."""
    kept = [buffer.clone() for buffer in buffers]
    for seed, buffer in enumerate(buffers):
        generator = Generator(buffer.device).manual_seed(seed)
        if buffer.is_floating_point():
            buffer.normal_(generator=generator)
        else:
            buffer.copy_(buffer[torch.randperm(len(buffer), generator=generator, device=buffer.device)])
    try:
        yield
    finally:
        for buffer, numbers in zip(buffers, kept, strict=True):
            buffer.copy_(numbers)


def _alike(seen: Prints, other: Prints) -> bool:
    return len(seen) == len(other) and all(
        a.resembles(b, _ROUNDING) for a, b in zip(seen, other, strict=True)
    )


def _print(tensor: torch.Tensor) -> Print:
    total = squares = 0.0
    flat = tensor.detach().reshape(-1)
    for piece in flat.split(PIECE):
        wide = piece.double()
        total += wide.sum().item()
        squares += wide.dot(wide).item()
    probes = flat[:: max(1, flat.numel() // PROBES)][:PROBES].double().tolist()
    return Print(tensor.numel(), total, math.sqrt(squares) if squares >= 0 else math.nan, tuple(probes))
