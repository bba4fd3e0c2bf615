"""Search for the fastest tile sizes of the fused kernels on a GPU: ``python -m impls.kernels.autotune``.

``nox -s tune`` runs it. It works through :data:`TASKS`, the shapes with a performance goal first. The table
of the GPU, ``tuned/<device>.json`` beside this file, is written after each task, and the next search
continues after the last. Triton's own autotuner would search in each process that launches a kernel; here
launches only look up what is committed (:mod:`impls.kernels.tiling`).

Kernels that draw dense noise are not tuned: drawing takes most of their time, whatever the tile sizes.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction, KernelInterface
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
from impls.kernels.tiling import DTYPE, Configuration, Table, Tiling, bucket, read_table, table_path

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
    def key(self) -> tuple[str, tuple[int, ...]]:
        """The key of its result in the table."""
        return self.kernel, bucket(self.sizes)

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
        """Return the tilings to time for these sizes, the default first, no tile larger than the product."""
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
    dropout.INPUTS: Tunable(
        functools.partial(launches.dropped, side="in"), lambda: dropout.INPUTS_TILING, _THROUGH_REGISTERS
    ),
    dropout.OUTPUTS: Tunable(functools.partial(launches.dropped, side="out"), lambda: dropout.TILING, _PLAIN),
    blocks.NAME: Tunable(launches.dropped_blocks, lambda *_: blocks.TILING, _PLAIN),
    **{
        name: Tunable(functools.partial(launches.outer_products, signs=signs), lambda _: outer.TILING, _PLAIN)
        for signs, name in outer.NAMES.items()
    },
}
"""Every kernel that can be tuned, by name."""


def compile_all(launch: Launch, tilings: Sequence[Tiling]) -> None:
    """Compile candidates on all CPU cores; the errors of broken ones are raised when they are launched."""
    warm_up = patch.object(
        KernelInterface, "__getitem__", lambda kernel, grid: functools.partial(kernel.warmup, grid=grid)
    )
    parse, one_at_a_time = JITFunction.parse, Lock()

    def parse_alone(kernel: JITFunction) -> ast.AST:
        with one_at_a_time:  # Python 3.11 may fail to parse in several threads (cpython issue 106905)
            return parse(kernel)

    parsing = patch.object(JITFunction, "parse", parse_alone)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, warm_up, parsing:  # noqa: SIM117  the pool ends last
        with triton.AsyncCompileMode(pool, ignore_errors=True):
            for tiling in tilings:
                with contextlib.suppress(Exception):
                    launch(tiling)


def gpu_time_ns(call: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU with warm caches, by replays of a graph of many calls."""
    return 1e6 * float(do_bench_cudagraph(call, rep=10, return_mode="median"))


def search(launch: Launch, tilings: Sequence[Tiling]) -> tuple[dict[Tiling, float], list[str]]:
    """Time the candidates whose results equal those of the default, which is the first.

    Returns:
        Times in ns, and a line for each candidate with a wrong result.

    """
    default, *others = tilings
    result = launch(default)
    expected = result.clone()
    times = {default: gpu_time_ns(lambda: launch(default))}
    wrong: list[str] = []
    for tiling in others:
        result.fill_(math.nan)  # a kernel that writes nothing must not leave the right numbers there
        try:
            result = launch(tiling)
            error = distance(result, expected)
            if error <= tolerance(expected.dtype):
                times[tiling] = gpu_time_ns(functools.partial(launch, tiling))
            else:
                wrong.append(f"{tiling} is wrong: off by {error:.2g} of the default's norm")
        except (RuntimeError, triton.TritonError) as raised:
            _say(f"{tiling} cannot be launched: {type(raised).__name__}")
    times[default] = min(times[default], gpu_time_ns(lambda: launch(default)))  # clocks may have risen since
    return times, wrong


def fastest(times: Mapping[Tiling, float]) -> Tiling:
    """Return the fastest tiling; the default, which is the first, if it is slower by LEAST_GAIN at most."""
    default, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] < (1 - LEAST_GAIN) * times[default] else default


def distance(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of ``expected``; infinite instead of NaN."""
    off = float((result.double() - expected.double()).norm() / expected.double().norm())
    return math.inf if math.isnan(off) else off


def tolerance(dtype: torch.dtype) -> float:
    """Return the tolerance for results that sum in a different order and are rounded to this dtype."""
    wide = torch.promote_types(dtype, torch.float32)
    return 2 * torch.finfo(dtype).eps + 32 * torch.finfo(wide).eps


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
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        _say("tuning needs a CUDA GPU, and torch sees none on this machine")
        return 2
    path = asked.out or table_path(torch.cuda.get_device_name())
    try:
        found = {(one.kernel, one.sizes): one for one in read_table(path).found}
    except UserError as error:
        _say(str(error))
        return 2
    current = {key for key, one in found.items() if one.triton == triton.__version__}
    tasks = [one for one in TASKS if fnmatchcase(one.kernel, asked.kernels) and one.key not in current]
    start, problems = time.monotonic(), 0
    for done, task in enumerate(tasks):
        spent = time.monotonic() - start
        if spent + spent / max(1, done) >= asked.seconds:
            _say(f"no time for {len(tasks) - done} tasks: {', '.join(map(str, tasks[done:]))}")
            break
        kernel = TUNABLES[task.kernel]
        tilings = kernel.tilings(task.sizes)
        launch = kernel.launch(task.sizes, DTYPE, torch.device("cuda"))
        compile_all(launch, tilings)
        times, wrong = search(launch, tilings)
        best = fastest(times)
        found[task.key] = Configuration(
            kernel=task.kernel,
            sizes=bucket(task.sizes),
            tiling=best,
            time_ns=times[best],
            default_ns=times[tilings[0]],
            triton=triton.__version__,
        )
        store.write_document(Table(found=tuple(found[key] for key in sorted(found))), path)
        for line in wrong:
            _say(f"{task}: {line}")
        problems += len(wrong)
        times_us = f"{times[best] / 1e3:.1f} us, the default {times[tilings[0]] / 1e3:.1f} us"
        _say(f"[{done + 1}/{len(tasks)}] {task}: {best} takes {times_us}")
    _say(f"{len(found)} entries in {path}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
