"""Search for the fastest tile sizes of the fused kernels on a GPU: ``python -m impls.kernels.autotune``.

``nox -s tune`` runs it. The table of the GPU, ``impls/kernels/tuned/<device>.json``, is written after each
task, and the next search continues after the last one. Triton's own autotuner would search in each process
that launches a kernel; here launches only look up the committed table (:mod:`impls.kernels.tiling`).

Kernels that draw dense noise are not tuned: drawing takes most of their time with any tile sizes.
Kernels on packed bits choose their tiles by the number of rows.
"""

import argparse
import ast
import contextlib
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface
from triton.testing import do_bench_cudagraph

from esbench import store
from esbench.errors import UserError
from impls.kernels import blocks, gemm, launches, lowrank_rng, outer, tiling
from impls.kernels.launches import Launch, Operands
from impls.kernels.tiling import DTYPE, Configuration, Table, Tiling, read_table, round_up_sizes, table_path

MIN_GAIN = 0.01
"""The default stays unless another candidate takes less time by more than this fraction."""


def _tilings(*sizes: tuple[int, ...]) -> tuple[Tiling, ...]:
    """Return tilings of these block_m, block_n, block_k, num_warps, num_stages and, if not 1, programs."""
    return tuple(Tiling(m, n, k, 8, *more) for m, n, k, *more in sizes)


# Rows, columns, channels, warps, stages and programs. Every candidate compiles for capability 9.0 without
# spills and fits into 227 KiB of shared memory: `python -m impls.kernels.compile_checks --candidates` checks
# it.
#
# Most kernels have one program on each multiprocessor that loops over tiles, `gemm.product_kernel`, by
# default of 128x256x64 with 8 warps and 3 stages. These tiles read the least from the L2 cache, 48 bytes in
# a cycle of the tensor cores, and a fourth stage does not fit beside the operands that end a tile; stages of
# 32 channels are half as large. What ends a tile, about a tenth of the time, is hidden only by a second
# program on the multiprocessor. Two fit with 4 warps or few columns; their smaller tiles read 64 to 96 bytes
# in a cycle.
_TWO_PROGRAMS = _tilings(
    (64, 256, 32, 4, 4, 2), (64, 128, 64, 4, 3, 2), (128, 64, 64, 8, 3, 2), (64, 128, 64, 8, 3, 2),
    (64, 64, 64, 4, 4, 2),
)  # fmt: skip
_ENDED = (
    *_tilings((128, 256, 32, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 256, 64, 8, 3)),
    *_TWO_PROGRAMS,
)
"""For kernels that load further operands, such as noise, when the sums of a tile are complete."""
_PLAIN = (
    *_tilings((128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 128, 8, 3), (128, 128, 32, 4, 4, 2)),
    *_ENDED,
)
"""For kernels that load nothing at the end of a tile."""
_THROUGH_REGISTERS = (
    *_tilings((128, 128, 32, 8, 4), (128, 128, 32, 4, 4, 2)),
    *_ENDED,
)
"""For kernels that compute with tiles of x in the loop of the product: more warps share this work."""
_NORMALS = _tilings(
    (128, 64, 64, 8, 3, 2), (128, 64, 32, 8, 4, 2), (128, 64, 64, 4, 3, 2), (64, 128, 64, 8, 3, 2),
    (64, 64, 64, 4, 3, 3), (64, 64, 128, 4, 3, 2), (256, 64, 64, 8, 3), (128, 128, 128, 8, 3),
    (128, 256, 64, 8, 3),
)  # fmt: skip
"""For kernels that draw normals when the sums are complete, of which few columns fit in registers."""
_LEVELS = _tilings(
    (128, 64, 64, 8, 3, 2), (128, 64, 32, 8, 4, 2), (64, 128, 64, 8, 3, 2), (64, 64, 64, 4, 3, 3),
    (64, 64, 128, 4, 3, 2), (128, 128, 32, 8, 4), (128, 128, 64, 8, 4), (64, 256, 32, 4, 4, 2),
    (128, 256, 32, 8, 4), (128, 256, 64, 8, 3), (256, 64, 64, 8, 3),
)  # fmt: skip
"""For kernels that draw levels, which take fewer registers."""
_BLOCKS = _tilings(
    (128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (256, 64, 64, 8, 3), (64, 128, 64, 4, 3),
    (128, 64, 64, 4, 3), (64, 64, 64, 4, 4),
)  # fmt: skip
"""For dropped blocks, whose kernel has a program for each tile."""
_SUMS = _tilings(
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 256, 32, 8, 4), (128, 128, 64, 8, 3),
    (128, 128, 128, 8, 3), (128, 128, 32, 4, 4), (256, 64, 64, 8, 3), (64, 256, 32, 4, 4),
    (64, 128, 64, 4, 3), (128, 64, 64, 4, 3), (64, 64, 64, 4, 4),
)  # fmt: skip
"""For sums of outer products, which have a program for each tile and part."""


class Tunable(NamedTuple):
    """A kernel whose tile sizes can be tuned.

    Attributes:
        make: make a launch from operands and the extra sizes.
        candidates: tile sizes to try besides the default, which must give the same result.
        extra_sizes: sizes besides rows, outputs and inputs that tile sizes depend on, such as ranks. Each
            tuple is a task.
        is_sum: whether the kernel computes a sum over rows instead of a product.
        kernel: the kernel whose tiles are tuned; a launch may have others.
    """

    make: Callable[..., Launch]
    candidates: Sequence[Tiling]
    extra_sizes: Sequence[tuple[int, ...]] = ((),)
    is_sum: bool = False
    kernel: Any = gemm.product_kernel

    def launch(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Launch:
        """Make operands of these sizes, and return the launch."""
        return self.make(Operands(sizes[:3], dtype, device), *sizes[3:])


TUNABLES: Mapping[str, Tunable] = {
    "hadamard": Tunable(launches.hadamard_noise, _ENDED),
    "low rank": Tunable(launches.low_rank, _ENDED, [(1,), (4,)]),
    "drawn low rank": Tunable(launches.drawn_low_rank, _NORMALS, [(1,)], kernel=lowrank_rng.drawn_up_kernel),
    "drawn low rank of levels": Tunable(
        functools.partial(launches.drawn_low_rank, law="uniform"),
        _LEVELS,
        [(1,)],
        kernel=lowrank_rng.drawn_up_kernel,
    ),
    "drawn low rank of signs": Tunable(
        functools.partial(launches.drawn_low_rank, law="sign"),
        (*_PLAIN, *_tilings((128, 256, 64, 8, 3))),
        [(1,)],
        kernel=lowrank_rng.drawn_up_kernel,
    ),
    "sparse": Tunable(launches.sparse_noise, _ENDED, [(1,), (2,)]),
    "flipped": Tunable(launches.flips, _THROUGH_REGISTERS),
    "two products": Tunable(launches.two_products, _PLAIN, [(1024,), (512,), (128,)]),
    "dropped inputs": Tunable(launches.dropout_product, _THROUGH_REGISTERS),
    "dropped outputs": Tunable(functools.partial(launches.dropout_product, side="out"), _ENDED),
    "dropped blocks": Tunable(
        launches.block_dropout_product, _BLOCKS, [(1, 2, 4), (2, 2, 8)], kernel=blocks.kept_blocks_kernel
    ),
    "outer products": Tunable(
        launches.outer_products, _SUMS, is_sum=True, kernel=outer.weighted_outer_kernel
    ),
    "outer products of signs": Tunable(
        functools.partial(launches.outer_products, signs=True),
        _SUMS,
        is_sum=True,
        kernel=outer.weighted_outer_kernel,
    ),
}
"""Every kernel that can be tuned, by its name in tables."""

SHAPES = ((8192, 1024, 1024), (1024, 8192, 8192), (1024, 1024, 1024))
"""Rows, outputs and inputs of the suite ``kernels``."""


class Task(NamedTuple):
    """A kernel and the sizes that it is tuned for.

    Attributes:
        kernel: its name in tables.
        sizes: rows, outputs and inputs of a product, or outputs, inputs and rows of a sum; then those of
            :attr:`Tunable.extra_sizes`.
    """

    kernel: str
    sizes: tuple[int, ...]

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """The key of its result in the table."""
        return self.kernel, round_up_sizes(self.sizes)

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"{self.kernel} {'x'.join(map(str, self.sizes))}"


def _tasks() -> Iterator[Task]:
    for rows, outputs, inputs in SHAPES:
        for name, tunable in TUNABLES.items():
            sizes = (outputs, inputs, rows) if tunable.is_sum else (rows, outputs, inputs)
            yield from (Task(name, (*sizes, *extra)) for extra in tunable.extra_sizes)


TASKS = tuple(_tasks())


def compile_all(launch: Launch, tilings: Sequence[Tiling | None]) -> None:
    """Compile candidates on all CPU cores; the errors of broken ones are raised when they are launched."""
    # A launch then compiles the kernel and does not run it.
    warm_up = patch.object(
        KernelInterface, "__getitem__", lambda kernel, grid: functools.partial(kernel.warmup, grid=grid)
    )
    parse, lock = JITFunction.parse, Lock()

    def parse_alone(kernel: JITFunction) -> ast.AST:
        with lock:  # Python 3.11 may fail to parse in several threads (cpython issue 106905)
            return parse(kernel)

    parsing = patch.object(JITFunction, "parse", parse_alone)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, warm_up, parsing:  # noqa: SIM117  the pool ends last
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for candidate in tilings:
                with contextlib.suppress(Exception):
                    launch(candidate)


def gpu_time_ns(call: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU with warm caches, by replays of a graph of many calls."""
    return 1e6 * float(do_bench_cudagraph(call, rep=10, return_mode="median"))


def search(launch: Launch, candidates: Sequence[Tiling]) -> tuple[dict[Tiling | None, float], list[str]]:
    """Time the default, which is None, and the candidates with the same result.

    Returns:
        Times in ns, and a line for each candidate with a wrong result.
    """
    result = launch(None)
    expected = result.clone()
    times: dict[Tiling | None, float] = {None: gpu_time_ns(lambda: launch(None))}
    wrong: list[str] = []
    for candidate in candidates:
        result.fill_(math.nan)  # a kernel that writes nothing must not leave the right numbers there
        try:
            result = launch(candidate)
            error = relative_error(result, expected)
            if error <= tolerance(expected.dtype):
                times[candidate] = gpu_time_ns(functools.partial(launch, candidate))
            else:
                wrong.append(
                    f"{candidate} is wrong: relative error {error:.2g} against the default tile sizes"
                )
        except (RuntimeError, triton.TritonError) as error:
            _say(f"{candidate} cannot be launched: {type(error).__name__}")
    times[None] = min(times[None], gpu_time_ns(lambda: launch(None)))  # clocks may have risen since
    return times, wrong


def fastest(times: Mapping[Tiling | None, float]) -> Tiling | None:
    """Return the fastest tiling; None, the default, unless another one is faster by MIN_GAIN."""
    best = min(times, key=times.__getitem__)
    return best if times[best] < (1 - MIN_GAIN) * times[None] else None


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of ``expected``; infinite instead of NaN."""
    error = float((result.double() - expected.double()).norm() / expected.double().norm())
    return math.inf if math.isnan(error) else error


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance for results that sum in a different order and are rounded to this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * torch.finfo(dtype).eps + 32 * torch.finfo(wide).eps


def tune(task: Task) -> tuple[Configuration, list[str]]:
    """Search for the fastest tile sizes of a task; return them and a line for each wrong candidate."""
    tunable = TUNABLES[task.kernel]
    launch = tunable.launch(task.sizes, DTYPE, torch.device("cuda"))
    candidates = list(dict.fromkeys(candidate.clip(*task.sizes[:3]) for candidate in tunable.candidates))
    with patch.object(tiling, "tuned_tilings", return_value={}):  # launches use defaults, not old results
        compile_all(launch, [None, *candidates])
        times, wrong = search(launch, candidates)
    best = fastest(times)
    configuration = Configuration(
        kernel=task.kernel,
        sizes=round_up_sizes(task.sizes),
        tiling=best,
        time_ns=times[best],
        default_ns=times[None],
        triton=triton.__version__,
    )
    return configuration, wrong


def _say(text: str) -> None:
    sys.stderr.write(f"tune: {text}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune and write the table after each task; tasks in it, tuned with this version of triton, are left out.

    Returns:
        0: done, or stopped after ``--seconds``; 1: a candidate computed something else than the default; 2:
        there is no GPU, or the table cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m impls.kernels.autotune",
        description="Search for the fastest tile sizes of every fused kernel on this GPU. The table is "
        "written after each task; another call continues with the tasks that are not in it.",
    )
    parser.add_argument("--kernels", default="*", help="glob over kernels, such as 'low rank'")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time limit: no task that may exceed it is started"
    )
    parser.add_argument("--out", type=Path, help="table to write; by default that of this GPU in the package")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        _say("tuning needs a CUDA GPU, and torch sees none on this machine")
        return 2
    path = options.out or table_path(torch.cuda.get_device_name())
    try:
        table = {(entry.kernel, entry.sizes): entry for entry in read_table(path).configurations}
    except UserError as error:
        _say(str(error))
        return 2
    current = {key for key, entry in table.items() if entry.triton == triton.__version__}
    tasks = [task for task in TASKS if fnmatchcase(task.kernel, options.kernels) and task.key not in current]
    start, status = time.monotonic(), 0
    for done, task in enumerate(tasks):
        seconds = time.monotonic() - start
        if seconds + seconds / max(1, done) >= options.seconds:
            _say(f"no time for {len(tasks) - done} tasks: {', '.join(map(str, tasks[done:]))}")
            break
        table[task.key], wrong = tune(task)
        store.write_document(Table(configurations=tuple(table[key] for key in sorted(table))), path)
        for line in wrong:
            _say(f"{task}: {line}")
            status = 1
        _say(f"[{done + 1}/{len(tasks)}] {task}: {table[task.key].describe()}")
    _say(f"{len(table)} entries in {path}")
    return status


if __name__ == "__main__":
    sys.exit(main())
