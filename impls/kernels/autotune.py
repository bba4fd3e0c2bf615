"""Search the fastest tile sizes of the fused kernels on a GPU, and look them up when a kernel is launched.

``python -m impls.kernels.autotune``, which ``nox -s tune`` runs, works through :data:`TASKS`, the shapes with
a performance goal first. Candidates are compiled by parallel processes, which need no GPU and fill Triton's
cache on disk; the process that measures only loads what is there. The table of the GPU,
``tuned/<device>.json`` beside this file, is written after each task: an interrupted search loses one task,
and the next search continues after the last.

Kernels that draw dense noise are not tuned: drawing takes most of their time, whatever the tile sizes.
Kernels on bits are not tuned either: their launch follows from the number of rows.
"""

import argparse
import functools
import math
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, Self

import msgspec
import torch
import triton
from torch import Generator, Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface
from triton.testing import do_bench_cudagraph

from esbench import store
from esbench.errors import UserError
from esbench.schema import slug
from impls.kernels.rows import Product, Tiling

# --- Tables: what was found, and how a launcher looks it up. ---

SCHEMA = 2
FOLDER = Path(__file__).parent / "tuned"
"""Where the tables are, one for each GPU model."""
_AGAIN = "tune again with `nox -s tune -- --again`"

Key = tuple[str, str, tuple[int, ...]]
"""Kernel, dtype, and sizes rounded up by :func:`bucket`."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Nanoseconds = Annotated[float, msgspec.Meta(gt=0)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose decoding refuses unknown fields."""


class Configuration(_Strict, frozen=True, kw_only=True):
    """The fastest tile sizes of a kernel, for a dtype and sizes rounded up by :func:`bucket`.

    ``rows`` to ``stages`` are fields of :class:`~impls.kernels.rows.Tiling`. ``default_ns`` is the time of a
    launch with the default tile sizes in the same rounds, ``triton`` the version that compiled both.
    """

    kernel: str
    dtype: str
    sizes: tuple[Count, ...]
    rows: Count
    columns: Count
    deep: Count
    group: Count
    warps: Count
    stages: Count
    time_ns: Nanoseconds
    default_ns: Nanoseconds
    triton: str

    @property
    def key(self) -> Key:
        """What it is looked up by."""
        return self.kernel, self.dtype, self.sizes

    @property
    def tiling(self) -> Tiling:
        """The tile sizes."""
        return Tiling(self.rows, self.columns, self.deep, self.group, self.warps, self.stages)


class Table(_Strict, frozen=True, kw_only=True):
    """Everything that was tuned on a GPU model."""

    schema: int
    device_name: str
    found: tuple[Configuration, ...]


def tuned(kernel: str, x: Tensor, *sizes: int) -> Tiling | None:
    """Return the fastest known tile sizes of a kernel on the GPU of ``x``, for its dtype and these sizes.

    None where they were not tuned, and on a CPU.

    Raises:
        UserError: the table of this GPU cannot be read; the message names the file.

    """
    if x.device.type != "cuda":
        return None
    return tilings(_device_name(x.device.index)).get((kernel, type_name(x.dtype), bucket(sizes)))


def chosen(kernel: str, read: Product, given: Tiling | None, default: Tiling, *more: int) -> Tiling:
    """Return the tile sizes of a product: those given, else the tuned ones, else the default for its dtype.

    Args:
        kernel: its name in tables.
        read: the product.
        given: tile sizes that the caller asks for.
        default: for a dtype of 16 bits, see :meth:`Tiling.suited`.
        more: what the tile sizes depend on besides rows, outputs and inputs.

    Raises:
        UserError: the table of this GPU cannot be read; the message names the file.

    """
    sizes = read.rows, *read.weight.shape
    found = given or tuned(kernel, read.x, *sizes, *more) or default.suited(read.x.dtype)
    return found.within(*sizes)


@functools.cache
def tilings(device_name: str) -> Mapping[Key, Tiling]:
    """Read the table of a GPU; empty where there is none.

    Raises:
        UserError: it cannot be read; the message names the file.

    """
    path = path_of(device_name)
    return {one.key: one.tiling for one in read_table(path, device_name).found} if path.exists() else {}


def path_of(device_name: str) -> Path:
    """Return the path of a GPU's table."""
    return FOLDER / f"{slug(device_name)}.json"


def read_table(path: Path, device_name: str) -> Table:
    """Read the table of a GPU.

    Raises:
        UserError: the file is no such table, or that of another GPU.

    """
    table = store.read_document(path, Table, what="table of tuned kernels", schema=SCHEMA, again=_AGAIN)
    if table.device_name != device_name:
        message = f"{path}: is the table of {table.device_name}, this GPU is {device_name}: {_AGAIN}"
        raise UserError(message)
    return table


def bucket(sizes: Iterable[int]) -> tuple[int, ...]:
    """Round each size up to a power of two, so that similar shapes share an entry."""
    return tuple(1 << max(0, size - 1).bit_length() for size in sizes)


def type_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a table."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


# --- What is tuned: shapes, kernels and candidates. ---

DTYPE = torch.bfloat16
"""What kernels are tuned for."""


class Task(NamedTuple):
    """A kernel and the sizes that it is tuned for.

    Attributes:
        kernel: its name in tables.
        sizes: rows, outputs and inputs of a product, or outputs, inputs and rows of a sum; then what else the
            tile sizes depend on, such as a rank.

    """

    kernel: str
    sizes: tuple[int, ...]

    @property
    def key(self) -> Key:
        """What its result is looked up by."""
        return self.kernel, type_name(DTYPE), bucket(self.sizes)

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"{self.kernel} {'x'.join(map(str, self.sizes))}"


def _tasks(kernels: Mapping[str, Sequence[tuple[int, ...]]], *sizes: int) -> list[Task]:
    return [Task(name, (*sizes, *more)) for name, each in kernels.items() for more in each]


def _tilings(*sizes: tuple[int, int, int, int, int]) -> tuple[Tiling, ...]:
    return tuple(
        Tiling(rows=rows, columns=columns, deep=deep, warps=warps, stages=stages)
        for rows, columns, deep, warps, stages in sizes
    )


_WITH_GOALS: Mapping[str, Sequence[tuple[int, ...]]] = {
    "hadamard": [()],
    "low rank": [(1,)],
    "drawn low rank": [(1,)],
    "drawn low rank of signs": [(1,)],
    "sparse": [(1,), (2,)],
    "flipped": [()],
    "two products": [(1024,), (128,)],
    "dropped inputs": [()],
    "dropped outputs": [()],
    "dropped blocks": [(1, 2, 4), (2, 2, 8)],
}
_OTHERS: Mapping[str, Sequence[tuple[int, ...]]] = {"low rank": [(4,)], "two products": [(512,)]}
_SUMS: Mapping[str, Sequence[tuple[int, ...]]] = {"outer products": [(1,)], "outer products of signs": [(1,)]}

TASKS: tuple[Task, ...] = (
    *_tasks(_WITH_GOALS, 8192, 1024, 1024),
    *_tasks(_SUMS, 1024, 1024, 8192),
    *_tasks(_WITH_GOALS, 1024, 8192, 8192),
    *_tasks(_SUMS, 8192, 8192, 1024),
    *_tasks(_OTHERS, 8192, 1024, 1024),
    *_tasks(_OTHERS, 1024, 8192, 8192),
    *_tasks(_WITH_GOALS, 1024, 1024, 1024),
    *_tasks(_OTHERS, 1024, 1024, 1024),
    *_tasks(_SUMS, 1024, 1024, 1024),
)
"""In the order in which they are tuned: the shapes of the suite ``kernels`` with a goal, then the others."""

# Rows, columns, channels, warps and stages. Two or three programs of 4 warps fit on a processor of an H100:
# one multiplies while another writes its result. Tiles of 128x256 read the least from the L2 cache.
_PLAIN = _tilings(
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 32, 8, 4), (256, 128, 64, 8, 3),
    (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (128, 128, 64, 4, 3),
    (128, 128, 32, 4, 4), (256, 64, 64, 8, 3), (64, 256, 64, 4, 3), (64, 256, 32, 4, 4),
    (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 4),
)  # fmt: skip
"""For kernels that multiply what they load: other noise is added when the sums are complete."""
_THROUGH_REGISTERS = _tilings(
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 32, 8, 4), (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4), (128, 128, 32, 8, 4), (128, 128, 32, 4, 4), (64, 256, 64, 8, 3),
    (64, 256, 32, 4, 4), (64, 128, 64, 8, 3), (64, 128, 64, 4, 3), (128, 64, 64, 8, 3),
    (64, 64, 64, 4, 4),
)  # fmt: skip
"""For kernels that compute with tiles of x in the loop of the product."""
_HADAMARD = _tilings(
    (128, 128, 64, 8, 4), (128, 64, 64, 8, 3), (128, 64, 32, 8, 4), (64, 256, 128, 8, 2),
    (64, 256, 128, 8, 3), (64, 128, 64, 8, 3), (64, 128, 64, 4, 3), (64, 128, 128, 8, 3),
    (64, 64, 64, 4, 4),
)  # fmt: skip
"""For Hadamard noise, whose tiles have at most two blocks of channels as columns."""
_NORMALS = _tilings(
    (128, 64, 64, 4, 3), (128, 64, 32, 8, 4), (256, 64, 64, 8, 3), (128, 128, 128, 8, 3),
    (64, 128, 64, 8, 3), (64, 64, 64, 4, 3), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3),
)  # fmt: skip
"""For kernels that draw normals for each row of a tile: more columns do not fit in registers."""

Launch = Callable[[Tiling], Tensor]
"""Launch a kernel with these tile sizes, on the same operands every time, and return the result."""


class Tunable(NamedTuple):
    """A kernel whose tile sizes can be tuned.

    Attributes:
        set_up: make operands of these sizes in this dtype on this device, and return the launch.
        default: the tile sizes for these sizes where nothing was tuned; others must give the same result.
        candidates: other tile sizes to try.

    """

    set_up: Callable[[tuple[int, ...], torch.dtype, torch.device], Launch]
    default: Callable[[tuple[int, ...]], Tiling]
    candidates: Sequence[Tiling]


class Operands:
    """Random operands: x [1, rows, 1, inputs], weight [outputs, inputs], y for the result, and other noise.

    On the device ``meta`` they have no data.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        """Draw x and the weight for sizes that begin with rows, outputs and inputs."""
        self.rows, self.outputs, self.inputs = sizes[:3]
        self._kind: dict[str, Any] = {"device": device}
        self._dtype = dtype
        if device.type != "meta":
            self._kind["generator"] = Generator(device).manual_seed(0)
        self.x = self.normal(1, self.rows, 1, self.inputs)
        self.weight = self.normal(self.outputs, self.inputs)
        self.y = self.x.new_empty(1, self.rows, 1, self.outputs)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normals."""
        return torch.randn(shape, dtype=self._dtype, **self._kind)

    def below(self, end: int, *shape: int) -> Tensor:
        """Draw indices from 0 to end - 1, int64."""
        return torch.randint(end, shape, **self._kind)

    def signs(self, *shape: int) -> Tensor:
        """Draw +1 and -1, int8."""
        return (2 * self.below(2, *shape) - 1).to(torch.int8)


@functools.cache
def tunables() -> dict[str, Tunable]:  # noqa: C901  one function for each kernel
    """Return every kernel that can be tuned, by name."""
    from impls.kernels import (  # noqa: PLC0415  these modules import this one
        blocks,
        dropout,
        flipped,
        hadamard,
        lowrank,
        outer,
        permuted,
        redrawn,
        sparse,
    )
    from impls.kernels.drawn import Draw  # noqa: PLC0415  the same

    sigma = 0.02

    def low_rank(to: Operands, rank: int) -> Launch:
        down, up = (to.normal(to.rows, rank, width) for width in (to.inputs, to.outputs))
        return lambda tiling: lowrank.low_rank_product(to.x, to.weight, down, up, sigma, to.y, tiling)

    def drawn_low_rank(to: Operands, rank: int, *, signs: bool) -> Launch:
        down, up = (Draw((0, 0), 0, draw, range(to.rows)) for draw in (0, 1))
        return lambda tiling: redrawn.redrawn_product(
            to.x, to.weight, down, up, rank, sigma, to.y, signs=signs, tiling=tiling
        )

    def hadamard_noise(to: Operands) -> Launch:
        before, after = (to.signs(to.rows, width) for width in (to.inputs, to.outputs))
        return lambda tiling: hadamard.hadamard_product(to.x, to.weight, before, after, sigma, to.y, tiling)

    def flips(to: Operands) -> Launch:
        core = to.normal(to.outputs, to.inputs)
        before, after = (to.signs(to.rows, width) for width in (to.inputs, to.outputs))
        return lambda tiling: flipped.flipped_product(
            to.x, to.weight, core, before, after, sigma, to.y, tiling
        )

    def two_products(to: Operands, count: int) -> Launch:
        second, core = to.normal(1, to.rows, 1, count), to.normal(to.outputs, count)
        return lambda tiling: permuted.added_product(to.x, to.weight, second, core, sigma, to.y, tiling)

    def sparse_noise(to: Operands, count: int) -> Launch:
        columns, values = to.below(to.inputs, to.rows, count), to.normal(to.rows, count, to.outputs)
        return lambda tiling: sparse.sparse_product(to.x, to.weight, columns, values, sigma, to.y, tiling)

    def dropped_inputs(to: Operands) -> Launch:
        mask = to.below(2, to.rows, to.inputs).bool()
        return lambda tiling: dropout.dropped_inputs(to.x, to.weight, mask, 2.0, 0.0, to.y, tiling)

    def dropped_outputs(to: Operands) -> Launch:
        mask = to.below(2, to.rows, to.outputs).bool()
        return lambda tiling: dropout.dropped_outputs(to.x, to.weight, mask, 2.0, 0.0, to.y, tiling)

    def dropped_blocks(to: Operands, out: int, inner: int, groups: int) -> Launch:
        cuts = blocks.Cut(out, out, to.outputs // out), blocks.Cut(inner, inner, to.inputs // inner)
        # Each group keeps the first half of each axis that is divided.
        changes = to.x.new_full((groups, out, inner), -1.0)
        changes[:, : -(-out // 2), : -(-inner // 2)] = 1.0
        return lambda tiling: blocks.kept_blocks(
            to.x, to.weight, changes, cuts, 2.0, 0.0, to.y, tiling=tiling
        )

    def weighted_sum(to: Operands, _cores: int, *, signs: bool) -> Launch:
        # The sizes of a sum are outputs, inputs and rows, in this order.
        outputs, inputs, rows = to.rows, to.outputs, to.inputs
        left, right = (
            to.signs(rows, width) if signs else to.normal(rows, width) for width in (outputs, inputs)
        )
        utilities = to.normal(rows)
        return lambda tiling: outer.weighted_outer(left, right, utilities, tiling=tiling)

    def tunable(
        make: Callable[..., Launch],
        default: Callable[..., Tiling],
        *candidates: Tiling,
        **more: Any,  # noqa: ANN401  passed on to make
    ) -> Tunable:
        return Tunable(
            lambda sizes, dtype, device: make(Operands(sizes, dtype, device), *sizes[3:], **more),
            lambda sizes: default(*sizes[3:]),
            candidates,
        )

    return {
        hadamard.NAME: tunable(hadamard_noise, lambda: hadamard.TILING, *_HADAMARD),
        lowrank.NAME: tunable(low_rank, lowrank.tiling_of, *_THROUGH_REGISTERS),
        **{
            name: tunable(
                drawn_low_rank,
                lambda _, signs=signs: redrawn.tiling_of(signs=signs),
                *(_PLAIN if signs else _NORMALS),
                signs=signs,
            )
            for signs, name in redrawn.NAMES.items()
        },
        sparse.NAME: tunable(sparse_noise, lambda _: sparse.TILING, *_PLAIN),
        flipped.NAME: tunable(flips, lambda: flipped.TILING, *_THROUGH_REGISTERS),
        permuted.NAME: tunable(two_products, lambda _: permuted.TILING, *_PLAIN),
        dropout.INPUTS: tunable(dropped_inputs, lambda: dropout.INPUTS_TILING, *_THROUGH_REGISTERS),
        dropout.OUTPUTS: tunable(dropped_outputs, lambda: dropout.TILING, *_PLAIN),
        blocks.NAME: tunable(dropped_blocks, lambda *_: blocks.TILING, *_PLAIN),
        **{
            name: tunable(weighted_sum, lambda _: outer.TILING, *_PLAIN, signs=signs)
            for signs, name in outer.NAMES.items()
        },
    }


def pruned(kernel: Tunable, sizes: tuple[int, ...], shared_limit: int) -> list[Tiling]:
    """Return the candidates for these sizes that can run, the default first.

    Candidates larger than the result become smaller ones, as in a launch. Left out is what needs more shared
    memory than a program can have: every stage but one holds a tile of both operands there.
    """
    default, *others = (one.within(*sizes[:3]) for one in (kernel.default(sizes), *kernel.candidates))
    room = [
        one
        for one in others
        if (one.stages - 1) * one.deep * (one.rows + one.columns) * DTYPE.itemsize <= shared_limit
    ]
    return list(dict.fromkeys((default, *room)))


# --- Compiling, in processes that need no GPU. ---

SHARED_LIMIT = {80: 163 * 1024, 87: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory that a program can have, by compute capability."""
LEAST_SHARED_LIMIT = 99 * 1024
"""The same for every other capability from 8.0 on."""

SPILL_LIMIT = 128
"""Bytes that a thread may spill: so few can be worth it, which timing decides."""

COMPILE_LIMIT_S = 60.0
"""How long the candidates of one task are waited for: a compiler may crash or never finish."""


class Compiled(NamedTuple):
    """What a launch compiled to, the largest numbers of all kernels that it starts.

    Attributes:
        registers: of a thread.
        stack_bytes: of a thread: registers that are spilled to memory.
        shared_bytes: of a program.

    """

    registers: int
    stack_bytes: int
    shared_bytes: int

    def obstacle(self, shared_limit: int) -> str:
        """Return why it is not worth timing, or an empty string."""
        if self.shared_bytes > shared_limit:
            return f"needs {self.shared_bytes} bytes of shared memory, a program can have {shared_limit}"
        return f"spills {self.stack_bytes} bytes" if self.stack_bytes > SPILL_LIMIT else ""


class Compiler:
    """Compiles candidates in processes of low priority; the code stays in Triton's cache on disk."""

    def __init__(self, plan: Mapping[Task, Sequence[Tiling]], capability: int, processes: int) -> None:
        """Start to compile the candidates of all tasks in their order.

        Args:
            plan: tasks and their candidates.
            capability: of the GPU, 90 for 9.0.
            processes: how many to start.

        """
        context = multiprocessing.get_context("spawn")  # a fork would inherit the context of the GPU
        self._pool = context.Pool(processes, _start_compiling, (capability,))
        self._jobs = {
            (task, tiling): self._pool.apply_async(compile_candidate, (task, tiling))
            for task, tilings in plan.items()
            for tiling in tilings
        }

    def __enter__(self) -> Self:
        """Return the compiler itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes, whatever they do."""
        self._pool.terminate()
        self._pool.join()

    def results(self, task: Task, tilings: Sequence[Tiling], until: float) -> dict[Tiling, Compiled | str]:
        """Wait for candidates until a monotonic time; return what each compiled to, or why it did not."""
        found: dict[Tiling, Compiled | str] = {}
        for tiling in tilings:
            job = self._jobs[task, tiling]
            job.wait(max(0.0, until - time.monotonic()))
            found[tiling] = job.get() if job.ready() else "was not compiled in time"
        return found


def _start_compiling(capability: int) -> None:
    """Turn this process into one whose launches only compile, for a GPU that need not exist."""
    os.nice(5)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends this one
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
        )
    )

    def launch(kernel: Any, grid: object) -> Callable[..., None]:  # noqa: ANN401  triton's functions have no type
        return lambda *operands, **options: _COMPILED.append(kernel.warmup(*operands, grid=grid, **options))

    KernelInterface.__getitem__ = launch


_COMPILED: list[Any] = []
"""What the current candidate has launched, in a process begun by :func:`_start_compiling`."""


def compile_candidate(task: Task, tiling: Tiling) -> Compiled | str:
    """Compile what a launch with these tile sizes needs; return why, where it does not compile.

    Operands are on the device ``meta``. The launcher sees their shapes, strides and alignment, which decide
    what is compiled, so that a launch on a GPU finds the code in the cache.
    """
    _COMPILED.clear()
    try:
        tunables()[task.kernel].set_up(task.sizes, DTYPE, torch.device("meta"))(tiling)
        found = [(*resource_usage(one.asm["cubin"]), int(one.metadata.shared)) for one in _COMPILED]
    except Exception as error:  # noqa: BLE001  whatever the compiler or the assembler raises is the reason
        return _reason(error)
    return Compiled(*(max(numbers) for numbers in zip(*found, strict=True)))


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread, as the machine code of a kernel says."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  triton's own
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return int(numbers["REG"]), int(numbers["STACK"])


def _reason(error: BaseException) -> str:
    """Return the first cause of an error in one line."""
    while error.__cause__:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


# --- Timing. ---

Timer = Callable[[Callable[[], object]], float]
"""Return the nanoseconds of one call."""

LEAST_GAIN = 0.01
"""The default stays unless another candidate takes less time by more than this share."""
FINALISTS = 3
"""Candidates that are timed again, in rounds with the default."""
ROUNDS = 5


class Found(NamedTuple):
    """The result of a task.

    Attributes:
        tiling: the fastest candidate.
        time_ns: of a launch with it.
        default_ns: of a launch with the default, measured in the same rounds.
        timed: how many candidates were timed.
        dropped: the others, and why.
        wrong: how many of those computed something else than the default.

    """

    tiling: Tiling
    time_ns: float
    default_ns: float
    timed: int
    dropped: dict[Tiling, str]
    wrong: int


class OutOfTimeError(Exception):
    """The time of a search is over."""


def gpu_time_ns(call: Callable[[], object]) -> float:
    """Time a call on the GPU, with warm caches, by replays of a graph of many calls."""
    return 1e6 * float(do_bench_cudagraph(call, rep=4, return_mode="median"))


def search(
    launch: Launch,
    compiled: Mapping[Tiling, Compiled | str],
    timer: Timer,
    shared_limit: int,
    until: float = math.inf,
) -> Found:
    """Time the candidates that compute what the default computes, and choose the fastest.

    Args:
        launch: what is timed.
        compiled: the candidates, the default first, and what each compiled to or why it did not.
        timer: the clock.
        shared_limit: bytes of shared memory that a program can have.
        until: when to give up, on the monotonic clock.

    Raises:
        OutOfTimeError: there was not enough time.

    """
    default = next(iter(compiled))
    result = launch(default)
    expected = result.clone()
    screened: dict[Tiling, float] = {}
    dropped: dict[Tiling, str] = {}
    wrong = 0
    for tiling, what in compiled.items():
        _check_time(until)
        reason = "" if tiling == default else what if isinstance(what, str) else what.obstacle(shared_limit)
        if not reason:
            result.fill_(math.nan)  # a kernel that writes nothing must not leave the right numbers there
            try:
                result = launch(tiling)
                error = distance(result, expected)
            except Exception as raised:  # noqa: BLE001  whatever the driver raises is the reason
                reason = _reason(raised)
            else:
                if error > tolerance(expected.dtype):
                    reason, wrong = f"is wrong: off by {error:.2g} of the default's norm", wrong + 1
        if reason:
            dropped[tiling] = reason
        else:
            screened[tiling] = timer(functools.partial(launch, tiling))
    ranked = sorted((one for one in screened if one != default), key=screened.__getitem__)
    times: dict[Tiling, list[float]] = {one: [] for one in (default, *ranked[:FINALISTS])}
    for _ in range(ROUNDS):
        for tiling, measured in times.items():
            _check_time(until)
            measured.append(timer(functools.partial(launch, tiling)))
    medians = {tiling: statistics.median(measured) for tiling, measured in times.items()}
    best = min(medians, key=medians.__getitem__)
    if medians[best] >= (1 - LEAST_GAIN) * medians[default]:
        best = default
    return Found(best, medians[best], medians[default], len(screened), dropped, wrong)


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise OutOfTimeError


def distance(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of what is expected; infinite if not a number."""
    off = float((result.double() - expected.double()).norm() / expected.double().norm())
    return math.inf if math.isnan(off) else off


def tolerance(dtype: torch.dtype) -> float:
    """Return how far results may differ whose sums are in another order and rounded to this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * torch.finfo(dtype).eps + 32 * torch.finfo(wide).eps


# --- The whole search. ---

TASK_S = 1.5
CANDIDATE_S = 0.1
COMPILE_S = 2.0
START_S = 10.0
"""Estimates: of a task, of each of its candidates, of compiling one, and of starting processes."""


def tune(
    plan: Mapping[Task, Sequence[Tiling]],
    set_up: Callable[[Task], Launch],
    compiled: Callable[[Task, Sequence[Tiling], float], Mapping[Tiling, Compiled | str]],
    timer: Timer,
    save: Callable[[Task, Found], None],
    shared_limit: int,
    until: float = math.inf,
) -> tuple[list[Task], int]:
    """Work through tasks, and save the result of each.

    Args:
        plan: the tasks and their candidates, the default first.
        set_up: makes the launch of a task.
        compiled: waits for candidates until a time, see :meth:`Compiler.results`.
        timer: the clock.
        save: stores a result.
        shared_limit: bytes of shared memory that a program can have.
        until: when to stop, on the monotonic clock. A task that would probably take longer is not begun.

    Returns:
        The tasks that there was no time for, and the number of wrong candidates and of tasks that failed.

    """
    begun, problems = time.monotonic(), 0
    for done, (task, tilings) in enumerate(plan.items()):
        now = time.monotonic()
        if now + (now - begun) / max(1, done) > until:
            return list(plan)[done:], problems
        try:
            candidates = compiled(task, tilings, min(until, now + COMPILE_LIMIT_S))
            found = search(set_up(task), candidates, timer, shared_limit, until)
        except OutOfTimeError:
            return list(plan)[done:], problems
        except (RuntimeError, triton.TritonError) as error:
            _say(f"{task}: could not be tuned: {_reason(error)}")
            problems += 1
            continue
        save(task, found)
        problems += found.wrong
        for tiling, reason in found.dropped.items():
            _say(f"{task}: {_text(tiling)} {reason}")
        spent = time.monotonic() - begun
        expected = min(spent / (done + 1) * (len(plan) - done - 1), until - time.monotonic())
        _say(
            f"[{done + 1}/{len(plan)}] {task}: {_text(found.tiling)} takes {found.time_ns / 1e3:.1f} us, the "
            f"default {found.default_ns / 1e3:.1f} us; {found.timed} of {len(tilings)} candidates timed; "
            f"{spent:.0f} s, about {expected:.0f} s left"
        )
    return [], problems


def _text(tiling: Tiling) -> str:
    sizes = f"{tiling.rows}x{tiling.columns}x{tiling.deep}"
    return f"{sizes}, {tiling.warps} warps, {tiling.stages} stages"


def _say(text: str) -> None:
    sys.stderr.write(f"tune: {text}\n")


# --- The command. ---


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, write the table, and return the exit code.

    0: done, or stopped after ``--seconds``; 1: a candidate computed something else than the default, or a
    task failed; 2: there is no GPU, or the table cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m impls.kernels.autotune",
        description="Search the fastest tile sizes of every fused kernel on this GPU. The table is written "
        "after each task; another call continues with the tasks that are not in it.",
    )
    parser.add_argument("--device", default="cuda", help="the GPU, such as cuda or cuda:1")
    parser.add_argument("--kernels", default="*", help="glob over kernels, such as 'low rank'")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--again", action="store_true", help="also tune what is in the table")
    parser.add_argument("--processes", type=int, help="that compile; by default one less than CPU cores")
    parser.add_argument("--out", type=Path, help="table to write; by default that of this GPU in the package")
    parser.add_argument("--compile", action="store_true", help="only fill Triton's cache; needs no GPU")
    parser.add_argument("--dry-run", action="store_true", help="list tasks and candidates; needs no GPU")
    asked = parser.parse_args(arguments)
    begun = time.monotonic()
    try:
        return _main(asked, begun + asked.seconds)
    except UserError as error:
        _say(str(error))
        return 2


def _main(asked: argparse.Namespace, until: float) -> int:  # noqa: C901  from the options to the exit code
    kernels = tunables()
    matching = [task for task in TASKS if fnmatchcase(task.kernel, asked.kernels)]
    if not matching:
        message = f"no kernel matches {asked.kernels!r}; there are: {', '.join(kernels)}"
        raise UserError(message)
    processes = asked.processes or max(1, len(os.sched_getaffinity(0)) - 1)
    has_gpu = asked.device.startswith("cuda") and torch.cuda.is_available()
    if not (has_gpu or asked.dry_run or asked.compile):
        message = f"tuning needs a CUDA GPU, and torch sees none on this machine for {asked.device!r}"
        raise UserError(message)
    capability = 90
    table = Table(schema=SCHEMA, device_name="", found=())
    if has_gpu:
        device = torch.device(asked.device)
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
        name = torch.cuda.get_device_name(device)
        path: Path = asked.out or path_of(name)
        table = _begun_table(path, name, again=asked.again)
    if asked.compile:
        return _compile(matching, table, capability, processes, until)
    limit = SHARED_LIMIT.get(capability, LEAST_SHARED_LIMIT)
    known = {one.key for one in table.found if one.triton == triton.__version__ and not asked.again}
    todo = [task for task in matching if task.key not in known]
    if len(todo) < len(matching):
        _say(f"{len(matching) - len(todo)} tasks are in the table: --again tunes them again")
    plan = {task: pruned(kernels[task.kernel], task.sizes, limit) for task in todo}
    if asked.dry_run:
        for task, tilings in plan.items():
            print(f"{task}: {len(tilings)} candidates: {'; '.join(map(_text, tilings))}")  # noqa: T201  its output
        print(_estimate(plan, processes))  # noqa: T201  the same
        return 0
    _say(_estimate(plan, processes))
    found = {one.key: one for one in table.found}

    def save(task: Task, came: Found) -> None:
        found[task.key] = Configuration(
            kernel=task.kernel,
            dtype=type_name(DTYPE),
            sizes=bucket(task.sizes),
            time_ns=came.time_ns,
            default_ns=came.default_ns,
            triton=triton.__version__,
            **came.tiling._asdict(),
        )
        entries = tuple(found[key] for key in sorted(found))
        store.write_document(Table(schema=SCHEMA, device_name=name, found=entries), path)

    def set_up(task: Task) -> Launch:
        return kernels[task.kernel].set_up(task.sizes, DTYPE, device)

    with Compiler(plan, capability, processes) as compiler, torch.cuda.device(device):
        left, problems = tune(plan, set_up, compiler.results, gpu_time_ns, save, limit, until)
    _say(f"{len(found)} entries in {path}")
    if left:
        _say(f"no time for {len(left)} tasks: {', '.join(map(str, left))}")
    return 1 if problems else 0


def _compile(tasks: Sequence[Task], table: Table, capability: int, processes: int, until: float) -> int:
    """Compile each task with the tile sizes of its launches; return 1 if one is not compiled in time."""
    kernels, tiles = tunables(), {one.key: one.tiling for one in table.found}
    plan = {task: [tiles.get(task.key) or kernels[task.kernel].default(task.sizes)] for task in tasks}
    problems = 0
    with Compiler(plan, capability, processes) as compiler:
        for task, (tiling,) in plan.items():
            limit = min(until, time.monotonic() + COMPILE_LIMIT_S)
            found = compiler.results(task, [tiling], limit)[tiling]
            if isinstance(found, str):
                _say(f"{task}: {_text(tiling)} {found}")
                problems += 1
    _say(f"{len(tasks) - problems} of {len(tasks)} tasks are compiled")
    return 1 if problems else 0


def _begun_table(path: Path, device_name: str, *, again: bool) -> Table:
    """Return the table to continue: an empty one in place of none, and of one that is not readable."""
    if path.exists():
        try:
            return read_table(path, device_name)
        except UserError:
            if not again:
                raise
    return Table(schema=SCHEMA, device_name=device_name, found=())


def _estimate(plan: Mapping[Task, Sequence[Tiling]], processes: int) -> str:
    """Describe how much there is to do and how long it will probably take."""
    candidates = sum(map(len, plan.values()))
    timing = len(plan) * TASK_S + candidates * CANDIDATE_S
    seconds = START_S + max(candidates * COMPILE_S / processes, timing) if plan else 0.0
    return (
        f"{len(plan)} tasks with {candidates} candidates, compiled by {processes} processes: "
        f"about {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
