"""Search the fastest tile sizes of the fused kernels on a GPU: ``python -m impls.kernels.autotune``.

``nox -s tune`` runs it. It works through :data:`TASKS`, the shapes with a performance goal first. The table
of the GPU, ``tuned/<device>.json`` beside this file, is written after each task, and the next search
continues after the last. Triton's own autotuner would search in each process that launches a kernel; here
launches only look up what is committed (:mod:`impls.kernels.tiling`).

Kernels that draw dense noise are not tuned: drawing takes most of their time, whatever the tile sizes.
Kernels on packed bits choose their tiles by the number of rows.
"""

import argparse
import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.runtime.jit import KernelInterface
from triton.testing import do_bench_cudagraph

from esbench import store
from esbench.errors import UserError
from impls.kernels import (
    blocks,
    dropout,
    flipped,
    hadamard,
    launches,
    lowrank,
    lowrank_rng,
    outer,
    permuted,
    sparse,
)
from impls.kernels.launches import Launch, Operands
from impls.kernels.tiling import (
    SCHEMA,
    Configuration,
    Key,
    Table,
    Tiling,
    bucket,
    dtype_name,
    read_table,
    table_path,
)

DTYPE = torch.bfloat16
"""The dtype that kernels are tuned for."""

LEAST_GAIN = 0.01
"""The default stays unless another candidate takes less time by more than this fraction."""


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
        return self.kernel, dtype_name(DTYPE), bucket(self.sizes)

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"{self.kernel} {'x'.join(map(str, self.sizes))}"


def _tasks(kernels: Mapping[str, Sequence[tuple[int, ...]]], *sizes: int) -> list[Task]:
    return [Task(name, (*sizes, *more)) for name, each in kernels.items() for more in each]


def _tilings(*sizes: tuple[int, int, int, int, int]) -> tuple[Tiling, ...]:
    """Return tilings of these block_m, block_n, block_k, num_warps and num_stages."""
    return tuple(Tiling(m, n, k, 8, warps, stages) for m, n, k, warps, stages in sizes)


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


class Tunable(NamedTuple):
    """A kernel whose tile sizes can be tuned.

    Attributes:
        make: make a launch from operands, and from the sizes after the first three.
        default: the tile sizes for those further sizes where nothing was tuned; others must give the same
            result.
        candidates: other tile sizes to try.

    """

    make: Callable[..., Launch]
    default: Callable[..., Tiling]
    candidates: Sequence[Tiling]

    def launch(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Launch:
        """Make operands of these sizes, and return the launch."""
        return self.make(Operands(sizes[:3], dtype, device), *sizes[3:])

    def tilings(self, sizes: Sequence[int]) -> list[Tiling]:
        """Return what to time for these sizes, the default first, no tile larger than the product."""
        every = (self.default(*sizes[3:]), *self.candidates)
        return list(dict.fromkeys(one.clipped(*sizes[:3]) for one in every))


TUNABLES: Mapping[str, Tunable] = {
    hadamard.NAME: Tunable(launches.hadamard_noise, lambda: hadamard.TILING, _HADAMARD),
    lowrank.NAME: Tunable(launches.low_rank, lowrank.default_tiling, _THROUGH_REGISTERS),
    **{
        name: Tunable(
            functools.partial(launches.drawn_low_rank, signs=signs),
            lambda _, signs=signs: lowrank_rng.default_tiling(DTYPE, signs=signs),
            _PLAIN if signs else _NORMALS,
        )
        for signs, name in lowrank_rng.NAMES.items()
    },
    sparse.NAME: Tunable(launches.sparse_noise, lambda _: sparse.TILING, _PLAIN),
    flipped.NAME: Tunable(launches.flips, lambda: flipped.TILING, _THROUGH_REGISTERS),
    permuted.NAME: Tunable(launches.two_products, lambda _: permuted.TILING, _PLAIN),
    dropout.INPUTS: Tunable(launches.dropped_inputs, lambda: dropout.INPUTS_TILING, _THROUGH_REGISTERS),
    dropout.OUTPUTS: Tunable(launches.dropped_outputs, lambda: dropout.TILING, _PLAIN),
    blocks.NAME: Tunable(launches.dropped_blocks, lambda *_: blocks.TILING, _PLAIN),
    **{
        name: Tunable(functools.partial(launches.outer_products, signs=signs), lambda _: outer.TILING, _PLAIN)
        for signs, name in outer.NAMES.items()
    },
}
"""Every kernel that can be tuned, by name."""


def compile_all(launch: Launch, tilings: Sequence[Tiling]) -> None:
    """Compile candidates on all CPU cores; one that does not compile raises when it is launched."""
    warm_up = patch.object(
        KernelInterface, "__getitem__", lambda kernel, grid: functools.partial(kernel.warmup, grid=grid)
    )
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, warm_up:  # noqa: SIM117  the pool ends last
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for tiling in tilings:
                with contextlib.suppress(Exception):
                    launch(tiling)


class Found(NamedTuple):
    """The result of a task.

    Attributes:
        tiling: the fastest candidate.
        time_ns: time of a launch with it.
        default_ns: time of a launch with the default.
        failed: candidates that cannot be launched, and why.
        wrong: candidates that computed something else than the default, and how far off it was.

    """

    tiling: Tiling
    time_ns: float
    default_ns: float
    failed: Mapping[Tiling, str]
    wrong: Mapping[Tiling, str]


def gpu_time_ns(call: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU with warm caches, by replays of a graph of many calls."""
    return 1e6 * float(do_bench_cudagraph(call, rep=10, return_mode="median"))


def search(launch: Launch, tilings: Sequence[Tiling]) -> Found:
    """Choose the fastest of the candidates that compute what the default, the first of them, computes."""
    default, *others = tilings
    result = launch(default)
    expected = result.clone()
    times = {default: gpu_time_ns(lambda: launch(default))}
    failed: dict[Tiling, str] = {}
    wrong: dict[Tiling, str] = {}
    for tiling in others:
        result.fill_(math.nan)  # a kernel that writes nothing must not leave the right numbers there
        try:
            result = launch(tiling)
            error = distance(result, expected)
            if error <= tolerance(expected.dtype):
                times[tiling] = gpu_time_ns(functools.partial(launch, tiling))
            else:
                wrong[tiling] = f"is wrong: off by {error:.2g} of the default's norm"
        except Exception as raised:  # noqa: BLE001  whatever the driver raises is the reason
            failed[tiling] = _reason(raised)
    times[default] = min(times[default], gpu_time_ns(lambda: launch(default)))  # clocks may have risen since
    best = min(times, key=times.__getitem__)
    if times[best] >= (1 - LEAST_GAIN) * times[default]:
        best = default
    return Found(best, times[best], times[default], failed, wrong)


def distance(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of ``expected``; infinite instead of NaN."""
    off = float((result.double() - expected.double()).norm() / expected.double().norm())
    return math.inf if math.isnan(off) else off


def tolerance(dtype: torch.dtype) -> float:
    """Return how far results may differ whose sums are in another order and rounded to this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * torch.finfo(dtype).eps + 32 * torch.finfo(wide).eps


def _reason(error: BaseException) -> str:
    """Return the first cause of an error in one line."""
    while error.__cause__:
        error = error.__cause__
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _text(tiling: Tiling) -> str:
    sizes = f"{tiling.block_m}x{tiling.block_n}x{tiling.block_k}"
    return f"{sizes}, {tiling.num_warps} warps, {tiling.num_stages} stages"


def _say(text: str) -> None:
    sys.stderr.write(f"tune: {text}\n")


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
    parser.add_argument("--kernels", default="*", help="glob over kernels, such as 'low rank'")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time limit: no task that may exceed it is started"
    )
    parser.add_argument("--out", type=Path, help="table to write; by default that of this GPU in the package")
    asked = parser.parse_args(arguments)
    try:
        return 1 if tune(asked.kernels, asked.out, asked.seconds) else 0
    except UserError as error:
        _say(str(error))
        return 2


def tune(kernels: str, out: Path | None, seconds: float) -> int:
    """Work through tasks and write the table after each of them; return the number of problems.

    Tasks that are in the table, tuned with this version of triton, are left out. A problem is a candidate
    with a wrong result, or a task that failed.

    Args:
        kernels: glob over kernels.
        out: the table, by default that of this GPU in the package.
        seconds: budget. A task that would probably end later is not begun.

    """
    tasks = [task for task in TASKS if fnmatchcase(task.kernel, kernels)]
    if not tasks:
        message = f"no kernel matches {kernels!r}; there are: {', '.join(TUNABLES)}"
        raise UserError(message)
    if not torch.cuda.is_available():
        message = "tuning needs a CUDA GPU, and torch sees none on this machine"
        raise UserError(message)
    device_name = torch.cuda.get_device_name()
    path = out or table_path(device_name)
    found = {one.key: one for one in read_table(path, device_name).found} if path.exists() else {}
    tasks = [one for one in tasks if one.key not in found or found[one.key].triton != triton.__version__]
    start, problems = time.monotonic(), 0
    for done, task in enumerate(tasks):
        spent = time.monotonic() - start
        if spent + spent / max(1, done) >= seconds:
            _say(f"no time for {len(tasks) - done} tasks: {', '.join(map(str, tasks[done:]))}")
            break
        kernel = TUNABLES[task.kernel]
        tilings = kernel.tilings(task.sizes)
        try:
            launch = kernel.launch(task.sizes, DTYPE, torch.device("cuda"))
            compile_all(launch, tilings)
            result = search(launch, tilings)
        except (RuntimeError, triton.TritonError) as error:
            _say(f"{task}: could not be tuned: {_reason(error)}")
            problems += 1
            continue
        problems += len(result.wrong)
        found[task.key] = Configuration(
            kernel=task.kernel,
            dtype=dtype_name(DTYPE),
            sizes=bucket(task.sizes),
            time_ns=result.time_ns,
            default_ns=result.default_ns,
            triton=triton.__version__,
            **result.tiling._asdict(),
        )
        entries = tuple(found[key] for key in sorted(found))
        store.write_document(Table(schema=SCHEMA, device_name=device_name, found=entries), path)
        for tiling, reason in {**result.failed, **result.wrong}.items():
            _say(f"{task}: {_text(tiling)} {reason}")
        spent = time.monotonic() - start
        times = f"{result.time_ns / 1e3:.1f} us, the default {result.default_ns / 1e3:.1f} us; {spent:.0f} s"
        _say(f"[{done + 1}/{len(tasks)}] {task}: {_text(result.tiling)} takes {times}")
    _say(f"{len(found)} entries in {path}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
