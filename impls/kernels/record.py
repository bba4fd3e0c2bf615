"""How much a launch of a compiled kernel computes, and the comparison of kernels with the committed record.

The record, ``compiled.json``, is what :mod:`impls.kernels.compile_checks` compiled when it was written. A
kernel that differs from it by more than the tolerances below is reported: it became slower, or the record has
to be renewed. ``docs/kernels.md`` is generated from it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esbench.compiled import FILE, PROCESSORS, RENEW, Code, CompiledKernel, Work
from impls.kernels.gemm import INTERPRETED_PROCESSORS
from impls.kernels.optional_triton import TensorDescriptor

PATH = Path(__file__).parents[2] / FILE

# A version of Triton compiles the same source to the same code. Tolerances are for changes of the source that
# cannot matter: they are smaller than what changes the time of a kernel.
REGISTERS = 8
"""Registers of a thread are given in multiples of 8."""
SHARED_BYTES = 1024
"""What a program takes besides its tiles, such as barriers; a stage of a pipeline has at least 8 KiB."""
LOOP = 0.05
"""Share of the instructions of the main loop, which are issued in about half of the time of its products."""
REST = 0.1
"""Share of the instructions of a tile outside of that loop, which are about a tenth of a program's time."""


# The work of a launch

_Iterations = Callable[[Mapping[str, Any]], list[int]]


def _product(arguments: Mapping[str, Any]) -> list[int]:
    pairs = (arguments["second"], arguments["pair"])
    return [math.ceil(pair.channels / arguments["BLOCK_K"]) for pair in pairs if pair is not None]


def _kept_blocks(arguments: Mapping[str, Any]) -> list[int]:
    kept = arguments["inputs"] * kept_share(arguments["in_blocks"]) / arguments["BLOCK_K"]
    return [math.ceil(kept * kept_share(arguments["out_blocks"]))]  # of a tile on average


def kept_share(blocks: int) -> float:
    """Return the share of blocks that :func:`~impls.kernels.launches.block_dropout_product` keeps."""
    return math.ceil(blocks / 2) / blocks


ITERATIONS: Mapping[str, _Iterations] = {
    "product_kernel": _product,
    "drawn_up_kernel": _product,
    "low_rank_down_kernel": lambda a: [math.ceil(a["inputs"] / (a["CALLS"] * a["WIDTH"]))],
    "hadamard_rows_kernel": lambda _: [1],  # its loop over tiles
    "gather_kernel": lambda _: [1],
    "fill_kernel": lambda _: [],
    "kept_blocks_kernel": _kept_blocks,
    "weighted_outer_kernel": lambda a: [math.ceil(a["part_rows"] / a["BLOCK_K"])],
    "add_parts_kernel": lambda a: [*divmod(a["count"], 4)],  # unrolled by the compiler
    "column_sums_kernel": lambda a: [math.ceil(len(a["order"]) / (len(a["starts"]) - 1) / a["AT_ONCE"])],
    "few_rows_kernel": lambda a: [
        math.ceil(a["inputs"] / (a["CALLS"] * a["WIDTH"])),
        math.ceil(a["inputs"] / a["BLOCK_K"]),
    ],
    "sample_bits_kernel": lambda a: [a["MEMBERS"] // a["AT_ONCE"]],
    "bit_product_kernel": lambda a: [math.ceil(a["depth"] / a["BLOCK_K"])],
    "centered_sum_kernel": lambda a: [math.ceil(a["part_members"] / a["AT_ONCE"])],
}
"""Name of a kernel -> iterations for a tile of all its loops, or of those with tensor cores."""
BEFORE_PRODUCT = frozenset({"low_rank_down_kernel", "hadamard_rows_kernel", "gather_kernel"})
"""Kernels whose programs compute ``tiles`` one after another, beside those of the product that follows."""


def work_of(kernel: str, arguments: Mapping[str, Any], grid: tuple[int, ...], code: Code) -> Work | None:
    """Return the work of a launch on an H200; None where the iterations of its loops are not known."""
    if kernel not in ITERATIONS:
        return None
    counts = ITERATIONS[kernel](arguments)
    tiles = programs = math.prod(grid)
    if "pair" in arguments:
        tiles = arguments["out"].tiles_m * arguments["out"].tiles_n
    elif kernel in BEFORE_PRODUCT:
        tiles = arguments["tiles"]
    if programs < tiles:  # they loop over tiles
        programs = min(tiles, PROCESSORS * math.ceil(programs / INTERPRETED_PROCESSORS))
    loops = code.main if len(counts) < len(code.steps) else range(len(code.steps))
    if len(loops) != len(counts):
        return None
    iterations = [0] * len(code.steps)
    for index, count in zip(loops, counts, strict=True):
        iterations[index] = count
    sizes = {
        tensor.untyped_storage()._cdata: tensor.nbytes  # noqa: SLF001  without data its address is 0
        for tensor in _tensors(arguments.values())
    }
    least_bytes = sum(sizes.values())
    if kernel == "kept_blocks_kernel":
        least_bytes -= round(
            next(_tensors([arguments["x"]])).nbytes * (1 - kept_share(arguments["in_blocks"]))
        )
    return Work(
        tiles=tiles,
        programs=programs,
        iterations=tuple(iterations),
        least_bytes=least_bytes,
        step_bytes=_step_bytes(arguments),
        overlaps=bool(arguments.get("launch_pdl")),
    )


def _step_bytes(arguments: Mapping[str, Any]) -> int:
    sizes: list[int] = [arguments[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if name in arguments]
    if len(sizes) < 3:  # noqa: PLR2004  rows, columns and channels
        return 0
    block_m, block_n, block_k = sizes
    operand = next(_tensors(arguments[name] for name in ("left", "x") if name in arguments))
    element_bytes = 1 if operand.dtype is torch.int32 else operand.itemsize  # a word of four signs
    return (block_m + block_n) * block_k * element_bytes


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, TensorDescriptor):
            yield value.base
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


# Comparison


def differences(
    compiled: CompiledKernel, recorded: CompiledKernel | None, *, is_same_compiler: bool
) -> list[str]:
    """Return how a kernel differs from the record, a line for each figure.

    Another version of the compiler gives other figures: then only a lost descriptor load is reported.
    """
    if recorded is None:
        return [f"is not in the record: run `{RENEW}`"]
    now, then = compiled.code, recorded.code
    changes: list[tuple[str, int, int, float]] = []
    if now.descriptor_loads < then.descriptor_loads:
        changes.append(("descriptor loads", then.descriptor_loads, now.descriptor_loads, 0.0))
    if is_same_compiler:
        changes += [
            ("registers", recorded.registers, compiled.registers, REGISTERS),
            ("bytes of shared memory", recorded.shared_bytes, compiled.shared_bytes, SHARED_BYTES),
            (
                "instructions in the main loop",
                then.loop_instructions,
                now.loop_instructions,
                LOOP * then.loop_instructions,
            ),
            (
                "other instructions",
                then.other_instructions,
                now.other_instructions,
                REST * then.other_instructions,
            ),
            ("warps", recorded.warps, compiled.warps, 0),
        ]
    return [
        f"has {found} {name} instead of {expected}: make it as it was, or run `{RENEW}`"
        for name, expected, found, tolerance in changes
        if abs(found - expected) > tolerance
    ]
