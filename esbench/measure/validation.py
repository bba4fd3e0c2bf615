"""Checks that a variant must pass for its times to be stored: correct results, and no shortcuts.

Before its set-up, a variant is checked on small cases in float64 (:class:`ExactChecks`). Before a phase is
timed, its call is made twice on different inputs (:func:`precheck`): results must be finite, differ between
inputs, and not change after they are returned. After timing, the call is compared with the reference
implementation on new inputs, with garbage collection off as in timing (:func:`postcheck`). A call must not
keep memory, work on another stream, or change torch's global settings (:class:`TorchState`).

Every check raises WrongResultError, whose message becomes the reason of the row.
"""

import contextlib
import dataclasses
import gc
import math
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator
from torch.nn.modules import module
from torch.optim import optimizer

from esbench.measure import timers
from esbench.measure.failure import Failure, NotCheckedError, classify
from esbench.measure.memory import Footprint
from esbench.measure.plan import is_base_or_naive
from esbench.registry import Entry
from esbench.schema import Case, Phase, Variant
from esbench.workload import UnavailableError, Workload, WrongResultError, build

if sys.platform != "win32":
    import resource

PATIENCE_S = (0.003, 0.03)
"""The wait for writes after a call has returned lasts as long as the call, within these bounds."""

BLOCK_ELEMENTS = 2**22
"""A tensor is converted to float64 in blocks of this many elements, without a large copy."""

PROBE_COUNT = 256
"""The number of elements in a fingerprint, in which two tensors of equal sum and norm differ."""

DRAWS = 64
"""The number of draws that are compared: 64 draws of one bit all equal the first with probability 2^-64."""

DRAWING_PHASES = frozenset[Phase]({"sample", "step"})
"""Phases that draw noise; each call draws that of the next step."""

NORMAL_ELEMENTS = 2**12
"""The most elements of an input on a CPU that gets new normal numbers; a larger one gets random signs."""
MIN_SIGNS = 64
"""The least number of random signs."""

ROUNDING = 0.02
"""The largest difference between two results of the same work in low precision, as a share of the norm."""
NO_CASE = "the suite check has no case of its operators"
"""Why a variant was not compared in float64, if it supports none of the cases."""

Fingerprints = tuple["Fingerprint", ...]


class ExactChecks:
    """Checks each variant once per operator on small cases in float64, where rounding hides no error.

    Attributes:
        compared: (variant, operator) -> the number of cases that were compared with the reference.
        not_compared: (variant, operator) -> why the first case that the set-up did not refuse was not.
    """

    def __init__(self, cases: Sequence[Case], device: str, seed: int) -> None:
        """Store the cases; nothing is checked yet."""
        self._cases = cases
        self._device = device
        self._seed = seed
        self._outcomes: dict[tuple[Variant, str], Failure | None] = {}
        self.compared: Counter[tuple[Variant, str]] = Counter()
        self.not_compared: dict[tuple[Variant, str], Failure] = {}

    def failure(self, entry: Entry, operator: str) -> Failure | None:
        """Return the failure of a variant on this operator; None if it passed or no case is available."""
        outcome = self.outcome(entry, operator)
        return outcome if outcome and outcome.status == "failed" else None

    def outcome(self, entry: Entry, operator: str) -> Failure | None:
        """Return the failure on the first wrong case, why no case is available, or None if it passed."""
        key = (entry.variant, operator)
        if key not in self._outcomes:
            self._outcomes[key] = self._check(entry, operator)
        return self._outcomes[key]

    def labels(self, entry: Entry, operator: str) -> tuple[str, ...]:
        """Return a label if a variant was compared on no case, or not on one that its set-up accepted."""
        key = (entry.variant, operator)
        outcome = self.outcome(entry, operator)
        if not self._cases or (self.compared[key] and key not in self.not_compared):
            return ()
        failure = self.not_compared.get(key, outcome)
        return (f"not checked in float64: {failure.reason if failure else NO_CASE}",)

    def _check(self, entry: Entry, operator: str) -> Failure | None:
        key = (entry.variant, operator)
        first_unavailable = None
        for case in self._cases:
            if case.operator != operator or not entry.supports(case):
                continue
            is_set_up = False
            try:
                workload = build(entry.scheme, case, self._device, self._seed)
                is_set_up = True
                verify(entry, workload)
                self.compared[key] += 1
            except BaseException as error:  # noqa: BLE001  # any error of a variant is stored as its reason
                failure = classify(error)
                failure = failure._replace(reason=f"{failure.reason} (on {case.label})")
                if failure.status == "failed":
                    return failure
                first_unavailable = first_unavailable or failure
                is_refused = isinstance(error, UnavailableError) and not is_set_up
                if not is_refused:
                    self.not_compared.setdefault(key, failure)
        return None if self.compared[key] else first_unavailable


def verify(entry: Entry, workload: Workload) -> None:
    """Run the check of a variant's workload, made before anything is timed.

    Raises:
        NotCheckedError: the check is empty. That of base and naive, the reference, may be.
        WrongResultError: a result is wrong.
    """
    if not is_base_or_naive(entry) and _is_empty(workload.verify):
        raise NotCheckedError("verify() of its workload is empty: compare results there")
    workload.verify()


def _is_empty(method: Callable[..., object]) -> bool:
    """Return whether a method uses nothing, as one inherited from the protocol ``Workload``."""
    code = getattr(method, "__code__", None)
    return code is not None and not code.co_names and not code.co_freevars


class Fingerprint(NamedTuple):
    """A fingerprint of a tensor: its sum, its norm and some elements, in float64."""

    size: int
    total: float
    norm: float
    probes: tuple[float, ...]

    def is_close(self, other: "Fingerprint", share: float) -> bool:
        """Return whether norm and elements differ by at most a share of the norm; the sum may cancel to 0."""
        return (
            self.size == other.size
            and abs(self.norm - other.norm) <= share * other.norm
            and math.dist(self.probes, other.probes) <= share * math.hypot(*other.probes)
        )


def fingerprints(result: object) -> Fingerprints:
    """Return the fingerprint of every tensor of a result."""
    return tuple(_fingerprint(tensor) for tensor in tensors(result))


def tensors(result: object) -> Iterator[torch.Tensor]:
    """Yield every tensor of a result: the result itself, or those in mappings, sequences and dataclasses."""
    items: Iterable[object] = ()
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        items = result.values()
    elif isinstance(result, list | tuple):
        items = result
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        items = [getattr(result, field.name) for field in dataclasses.fields(result)]
    for item in items:
        yield from tensors(item)


def precheck(workload: Workload, phase: Phase, synchronize: Callable[[], object]) -> Fingerprints:
    """Check two calls in a phase that was just entered; return the fingerprints of the first result.

    Raises:
        WrongResultError: a result is not finite, was written late, or is the same for different inputs.
    """
    call = workload.phases[phase]
    first = _check_late_writes(call, phase, synchronize)
    second = fingerprints(call())  # memory may have room for one result only: the first is freed by now
    check_finite(second, phase)
    inputs_differ = len(workload.inputs) > 1 or phase == "sample"
    are_equal = first == second and first != ()  # a result without tensors has no fingerprints
    if inputs_differ and are_equal and not _may_results_be_equal(workload, phase, call, first):
        raise WrongResultError(
            f"{phase} returns the same result for different inputs: it reuses an earlier result"
        )
    return first


def _may_results_be_equal(
    workload: Workload, phase: Phase, call: Callable[[], object], seen: Fingerprints
) -> bool:
    """Return whether equal results for different inputs can be correct, as with dropout of all inputs.

    If the phase draws noise, one of the next draws must differ. Otherwise :meth:`Workload.confirm` must write
    new inputs, and the call must agree with the reference implementation on them.
    """
    if phase in DRAWING_PHASES:
        return any(fingerprints(call()) != seen for _ in range(DRAWS))
    with _replaced_inputs(workload.inputs):
        before = fingerprints(workload.inputs)
        try:
            workload.confirm(phase)
        except WrongResultError:
            return False
        are_inputs_new = fingerprints(workload.inputs) != before
    workload.enter(phase)
    return are_inputs_new


def postcheck(workload: Workload, phase: Phase, before: Fingerprints) -> bool:
    """Compare a call with the reference implementation after timing, with garbage collection off.

    Garbage collection is off so that a call cannot tell this check from timing. Noise has no reference: its
    fingerprints are compared with those ``before`` timing, of the same step.

    Returns:
        Whether :meth:`Workload.confirm` compared a result for new inputs: False if it is empty or left the
        inputs as they were.

    Raises:
        WrongResultError: the result is wrong.
    """
    workload.enter(phase)
    with timers.quiet():
        result = fingerprints(workload.phases[phase]())
        check_finite(result, phase)
        if phase == "sample" and not _are_close(result, before):
            raise WrongResultError("sample draws different noise for the same step before and after timing")
        old_inputs = fingerprints(workload.inputs)
        try:
            workload.confirm(phase)
        except WrongResultError as error:
            raise WrongResultError(f"{error}; found after timing, on new inputs") from error
        are_inputs_new = not old_inputs or fingerprints(workload.inputs) != old_inputs
        return are_inputs_new and not _is_empty(workload.confirm)


def check_replay(workload: Workload, phase: Phase, replay: Callable[[], object]) -> None:
    """Compare replays of a graph with calls of the phase that it was captured from, on new inputs.

    Calls and replays begin at the first input. In a phase that draws noise, they begin at the first step and
    go through all inputs twice: the second pass must have new noise.

    Raises:
        WrongResultError: a replay gives another result than the call, or draws the same noise again.
    """
    turns = max(1, len(workload.inputs))
    draws_noise = phase in DRAWING_PHASES
    calls = 2 * turns if draws_noise else turns

    def results(call: Callable[[], object]) -> list[Fingerprints]:
        if draws_noise:
            workload.enter(phase)  # begins again at the first step
        return [fingerprints(call()) for _ in range(calls)]

    with _replaced_inputs(workload.inputs):
        called, replayed = results(workload.phases[phase]), results(replay)
    if draws_noise:
        for first, second in zip(range(turns), range(turns, calls), strict=True):  # with the same input
            is_noise_new = not _are_close(called[first], called[second])
            if is_noise_new and _are_close(replayed[first], replayed[second]):
                raise WrongResultError(
                    f"{phase} replayed from a CUDA graph draws the same noise each time: the step number "
                    "must be a tensor, because a graph keeps a Python number as it was when captured"
                )
    for graph_result, call_result in zip(replayed, called, strict=True):
        check_finite(graph_result, f"{phase} replayed from a CUDA graph")
        if not _are_close(graph_result, call_result):
            raise WrongResultError(
                f"{phase} replayed from a CUDA graph gives another result than a call: a graph does not "
                "repeat work on the CPU"
            )


def check_finite(result: Fingerprints, producer: str) -> None:
    """Check that a result has neither inf nor NaN; ``producer`` names its call in the message."""
    if not all(math.isfinite(tensor.total) and math.isfinite(tensor.norm) for tensor in result):
        raise WrongResultError(f"{producer} gives values that are not finite")


def check_memory(footprint: Footprint, phase: Phase, least_bytes: int = 0) -> None:
    """Check that a call keeps no memory after its result is freed, and allocates ``least_bytes``.

    An update and a step free earlier gradients before they allocate new ones, so their peak can be lower.
    """
    if footprint.kept_bytes > 0:
        raise WrongResultError(f"{phase} leaves {footprint.kept_bytes} bytes more allocated after each call")
    if phase in {"sample", "forward"} and footprint.peak_bytes < least_bytes:
        raise WrongResultError(
            f"{phase} returns {least_bytes} bytes but allocates at most {footprint.peak_bytes}: it returns "
            "memory of an earlier call, which the next call may overwrite"
        )


def count_bytes(result: object) -> int:
    """Return the bytes of the tensors of a result; tensors that share memory count once."""
    sizes = {  # an expanded tensor has more bytes than its storage
        tensor.untyped_storage().data_ptr(): min(tensor.nbytes, tensor.untyped_storage().nbytes())
        for tensor in tensors(result)
    }
    return sum(sizes.values())


class TorchState:
    """Torch's global settings, which no variant may change."""

    def __init__(self) -> None:
        self._settings = _settings()

    def check(self) -> None:
        """Check that settings are unchanged, and restore them if not."""
        changed = {name: value for name, value in _settings().items() if value != self._settings[name]}
        for name in changed:
            _, write = _SETTINGS[name]
            write(self._settings[name])
        if changed:
            changes = ", ".join(f"{name} from {self._settings[name]} to {changed[name]}" for name in changed)
            raise WrongResultError(f"it changed a global setting: {changes}")

    def restore(self) -> None:
        """Restore settings that a variant changed before it failed."""
        with contextlib.suppress(WrongResultError):
            self.check()


_MODULE_HOOKS = (
    module._global_forward_pre_hooks,  # noqa: SLF001  # no public function counts them
    module._global_forward_hooks,  # noqa: SLF001  # the same
    module._global_backward_hooks,  # noqa: SLF001  # the same
)
_OPTIMIZER_HOOKS: tuple[dict[int, Any], ...] = (
    optimizer._global_optimizer_pre_hooks,  # noqa: SLF001  # the same
    optimizer._global_optimizer_post_hooks,  # noqa: SLF001  # the same
)


def _remove_hooks(kinds: Iterable[dict[int, Any]], counts: Iterable[int]) -> None:
    """Remove the newest hooks of each kind until there are as many as given."""
    for hooks, count in zip(kinds, counts, strict=True):
        while len(hooks) > count:
            hooks.popitem()


_INFERENCE_MODES: list[torch.inference_mode] = []
"""Contexts that stay open: torch restores the earlier mode when a context is freed."""


def _set_inference_mode(enabled: bool) -> None:  # noqa: FBT001  # the signature of setters
    """Switch inference mode on or off; torch has only a context manager for it."""
    mode = torch.inference_mode(enabled)
    mode.__enter__()
    _INFERENCE_MODES.append(mode)


def _remove_function_modes(count: int) -> None:
    """Remove the innermost torch function modes until there are as many as given."""
    while torch._C._len_torch_function_stack() > count:  # noqa: SLF001  # no public function counts them
        torch._C._pop_torch_function_stack()  # noqa: SLF001  # the same


_LIMITS = ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE")
"""The limits of a process's memory, time and files; the harness itself sets RLIMIT_DATA."""


def _soft_limit(name: str) -> int:
    return resource.getrlimit(getattr(resource, name))[0]


def _set_soft_limit(name: str, value: int) -> None:
    limit = getattr(resource, name)
    resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the precision of float32 products": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "the detection of anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    # torch.get_default_device is slow, and a default device of cpu slows torch down: None is the same device.
    "the default device": (
        lambda: torch.empty(0).device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    # Torch has no function that reads it; it holds for floats of Python, too.
    "the flushing of denormal numbers": (lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
    "the use of oneDNN": (
        lambda: torch.backends.mkldnn.enabled,
        partial(setattr, torch.backends.mkldnn, "enabled"),
    ),
    "the search for cuDNN algorithms": (
        lambda: torch.backends.cudnn.benchmark,
        partial(setattr, torch.backends.cudnn, "benchmark"),
    ),
    "the thresholds of garbage collection": (
        gc.get_threshold,
        lambda thresholds: gc.set_threshold(*thresholds),
    ),
    "the global hooks of modules": (
        lambda: tuple(map(len, _MODULE_HOOKS)),
        partial(_remove_hooks, _MODULE_HOOKS),
    ),
    "the global hooks of optimizers": (
        lambda: tuple(map(len, _OPTIMIZER_HOOKS)),
        partial(_remove_hooks, _OPTIMIZER_HOOKS),
    ),
    "the inference mode": (torch.is_inference_mode_enabled, _set_inference_mode),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "the profile function": (sys.getprofile, sys.setprofile),
    "the trace function": (sys.gettrace, sys.settrace),
    "the torch function modes": (torch._C._len_torch_function_stack, _remove_function_modes),  # noqa: SLF001  # as above
    **(
        {
            "the processors": (lambda: os.sched_getaffinity(0), lambda cores: os.sched_setaffinity(0, cores)),
            **{name: (partial(_soft_limit, name), partial(_set_soft_limit, name)) for name in _LIMITS},
        }
        if sys.platform == "linux"
        else {}
    ),
}
"""Setting -> functions that read it and set it."""


def _settings() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def _check_late_writes(
    call: Callable[[], object], phase: Phase, synchronize: Callable[[], object]
) -> Fingerprints:
    """Call once, check that the result does not change after it was returned; return its fingerprints."""
    start_s = time.monotonic()
    result = call()
    call_s = time.monotonic() - start_s
    before = fingerprints(result)
    check_finite(before, phase)
    min_s, max_s = PATIENCE_S
    time.sleep(min(max(call_s, min_s), max_s))
    synchronize()
    if fingerprints(result) != before:
        raise WrongResultError(
            f"{phase} returned before its result was complete: the values changed after the call"
        )
    return before


class InputRenewal:
    """Writes new values into inputs before they are read, so that stored results are of no use.

    Calls read the inputs in turn, so that all are renewed together, before the first of them is read. Small
    inputs get N(0, 1) numbers. In large ones on a CPU, where drawing takes long, columns change their sign at
    random; rows do if there are few columns. The rows of integers are permuted.
    """

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers, self._calls, seed = buffers, 0, secrets.randbits(62)
        devices = {buffer.device for buffer in buffers}
        self._generators = {device: Generator(device).manual_seed(seed) for device in devices}

    @torch.no_grad()
    def __call__(self) -> None:
        """Renew the inputs before every ``len(inputs)``-th call."""
        if self._buffers and self._calls % len(self._buffers) == 0:
            for buffer in self._buffers:
                _renew(buffer, self._generators[buffer.device])
        self._calls += 1


def _renew(buffer: torch.Tensor, generator: Generator) -> None:
    """Write new values of the same distribution into an input, [rows, ...]."""
    if not buffer.is_floating_point():
        _permute_rows(buffer, generator)
    elif buffer.device.type != "cpu" or buffer.numel() <= NORMAL_ELEMENTS:
        buffer.normal_(generator=generator)
    else:
        sign_per_column = buffer.shape[1:]
        sign_per_row = (len(buffer), *[1] * (buffer.dim() - 1))
        shape = sign_per_column if sign_per_column.numel() >= MIN_SIGNS else sign_per_row
        bits = torch.randint(0, 2, shape, generator=generator, dtype=buffer.dtype)
        buffer.mul_(2 * bits - 1)


def _permute_rows(buffer: torch.Tensor, generator: Generator) -> None:
    buffer.copy_(buffer[torch.randperm(len(buffer), generator=generator, device=buffer.device)])


@contextlib.contextmanager
def _replaced_inputs(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Replace inputs inside the context: floats by N(0, 1) numbers, integers by permuted rows."""
    originals = [buffer.clone() for buffer in buffers]
    for buffer in buffers:
        generator = Generator(buffer.device).manual_seed(secrets.randbits(62))
        if buffer.is_floating_point():
            buffer.normal_(generator=generator)
        else:
            _permute_rows(buffer, generator)
    try:
        yield
    finally:
        for buffer, original in zip(buffers, originals, strict=True):
            buffer.copy_(original)


def _are_close(left: Fingerprints, right: Fingerprints) -> bool:
    return len(left) == len(right) and all(a.is_close(b, ROUNDING) for a, b in zip(left, right, strict=True))


def _fingerprint(tensor: torch.Tensor) -> Fingerprint:
    total = squares = 0.0
    flat = tensor.detach().reshape(-1)
    for block in flat.split(BLOCK_ELEMENTS):
        float64 = block.double()
        total += float64.sum().item()
        squares += float64.dot(float64).item()
    probes = flat[:: max(1, flat.numel() // PROBE_COUNT)][:PROBE_COUNT].double().tolist()
    return Fingerprint(tensor.numel(), total, math.sqrt(squares), tuple(probes))
