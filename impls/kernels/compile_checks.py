"""Compile every kernel for GPUs that need not be present: ``python -m impls.kernels.compile_checks``.

Each check runs a launcher on tensors of the device ``meta`` and looks at the code of the kernel that it would
launch: instructions that make it fast, spilled registers and shared memory. ``nox -s kernels`` runs all
checks and writes what was found for the report; the tests run one check of each kernel.

Exit codes: 0 done; 1 a kernel does not compile to what it should; 2 triton is not installed.
"""

import argparse
import functools
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import impls
from esbench import git, store
from esbench.studies.kernels import (
    FILE,
    SCHEMA,
    Compilation,
    Compilations,
    Refused,
)
from impls.kernels import (
    binary,
    binary_matmul,
    blocks,
    dense_rng,
    dropout,
    flipped,
    hadamard,
    launches,
    lowrank,
    lowrank_rng,
    outer,
    permuted,
    philox,
    sparse,
)
from impls.kernels.launches import SIGMA, Launch, Operands
from impls.kernels.optional_triton import triton
from impls.kernels.philox import NORMALS, SIGNS

CAPABILITIES = (80, 90)
"""Compute capabilities that kernels are compiled for: 90 is 9.0."""

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory of a program, by capability."""

MAX_SPILLED_BYTES = 0
"""Registers of a thread that may be moved to memory."""

META = torch.device("meta")


class Dtype(NamedTuple):
    """A dtype of operands, and the instruction that its product must compile to.

    Attributes:
        name: in titles.
        dtype: of tensors.
        mma: the instruction of a product, by capability.

    """

    name: str
    dtype: torch.dtype
    mma: Mapping[int, str]

    @property
    def small_mma(self) -> Mapping[int, str]:
        """The instruction of a product of fewer than 64 rows, which is too small for wgmma."""
        return {
            capability: one.replace("wgmma.mma_async", "mma.sync") for capability, one in self.mma.items()
        }


MATRIX_UNITS = {80: "mma.sync", 90: "wgmma.mma_async"}
BFLOAT16 = Dtype("bfloat16", torch.bfloat16, MATRIX_UNITS)
# Matrix units have no float32; for float64 capability 9.0 has the older instruction only.
FLOAT32 = Dtype("float32", torch.float32, dict.fromkeys(CAPABILITIES, "fma.rn.f32"))
TFLOAT32 = Dtype("tfloat32", torch.float32, MATRIX_UNITS)
FLOAT64 = Dtype("float64", torch.float64, dict.fromkeys(CAPABILITIES, "mma.sync"))
NORMAL_DTYPES = (BFLOAT16, FLOAT32, TFLOAT32)
"""Of kernels that draw normals, in float32."""
DTYPES = (*NORMAL_DTYPES, FLOAT64)


class Compiled(NamedTuple):
    """The code of a kernel.

    Attributes:
        ptx: the assembly.
        registers: of a thread.
        shared_bytes: of a program.
        spilled_bytes: registers of a thread that are moved to its stack.
        num_warps: of a program.
        num_stages: depth of the software pipeline.
        arguments: keyword arguments of the launch.

    """

    ptx: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    num_warps: int = 4
    num_stages: int = 3
    arguments: Mapping[str, Any] = {}

    def count(self, *instructions: str) -> int:
        """Count instructions whose names begin with one of these regular expressions; loops count once."""
        return len(re.findall(rf"^\s*(?:@\S+\s+)?(?:{'|'.join(instructions)})", self.ptx, re.MULTILINE))


@dataclass(frozen=True, eq=False)
class Check:
    """A launch, and the instructions that its kernel must contain.

    Attributes:
        title: unique, ends with the dtype.
        kernel: the kernel that is looked at; others of the same launch are not compiled.
        launch: runs a launcher on meta tensors.
        required: instructions that must be there, by capability, as regular expressions of their beginning.
        forbidden: instructions that must not.
        limit: check more of what was compiled: return what is wrong, or an empty string.
        tf32: whether float32 products use TF32.

    """

    title: str
    kernel: Any
    launch: Callable[[], object]
    required: Mapping[int, Sequence[str]] = field(default_factory=dict)
    forbidden: Sequence[str] = ()
    limit: Callable[[Compiled], str] = lambda _: ""
    tf32: bool = False

    def problems(self, capability: int, found: Compiled) -> list[str]:
        """Return the faults of the compiled code."""
        wrong = [f"has no {name}" for name in self.required.get(capability, ()) if not found.count(name)]
        wrong += [f"has {name}" for name in self.forbidden if found.count(name)]
        if found.spilled_bytes > MAX_SPILLED_BYTES:
            wrong.append(f"spills {found.spilled_bytes} bytes")
        if found.shared_bytes > MAX_SHARED_BYTES[capability]:
            wrong.append(f"needs {found.shared_bytes} bytes of shared memory")
        return wrong + [text for text in [self.limit(found)] if text]


@functools.cache
def compile_check(check: Check, capability: int) -> Compiled:
    """Compile the kernel of a check for a GPU of this capability.

    Raises:
        triton.TritonError: it does not compile.

    """
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415  triton need not be there
    from triton.runtime import driver  # noqa: PLC0415  triton need not be there
    from triton.runtime.jit import KernelInterface  # noqa: PLC0415  triton need not be there

    no_gpu = SimpleNamespace(
        # Triton keeps what it compiled by device.
        get_current_device=lambda: capability,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    compiled: list[Compiled] = []

    def launch(kernel: Any, grid: object) -> Callable[..., None]:  # noqa: ANN401  triton's functions have no type
        def compile_kernel(*operands: object, **arguments: Any) -> None:  # noqa: ANN401  Triton's functions have no type
            if kernel is not check.kernel:
                return
            built = kernel.warmup(*operands, grid=grid, **arguments)
            registers, spilled = resource_usage(built.asm["cubin"])
            of = built.metadata
            sizes = (registers, of.shared, spilled, of.num_warps, of.num_stages)
            compiled.append(Compiled(built.asm["ptx"], *sizes, arguments))

        return compile_kernel

    settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    settings.allow_tf32 = check.tf32
    try:
        with patch.object(driver, "_active", no_gpu), patch.object(KernelInterface, "__getitem__", launch):
            check.launch()
    finally:
        settings.allow_tf32 = before
    return compiled[0]


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  triton's own
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return int(numbers["REG"]), int(numbers["STACK"])


# --- Checks. ---

SIZES = (8192, 1024, 1024)
"""Rows, outputs and inputs of most products."""


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device=META)


def operands(
    dtype: torch.dtype, members: int = 1024, repeats: int = 1, positions: int = 1, inputs: int = 1024
) -> Operands:
    """Return operands of a layer with 1024 outputs."""
    return Operands((members, 1024, inputs), dtype, META, repeats, positions)


def every(
    title: str,
    kernel: Any,  # noqa: ANN401  Triton's functions have no type
    launch: Callable[[torch.dtype], object],
    dtypes: Sequence[Dtype] = DTYPES,
    required: Sequence[str] = (),
    *,
    is_small: bool = False,
    is_product: bool = True,
    calls: Sequence[str] = (),
) -> Iterator[Check]:
    """Return a check of the same launch for each dtype.

    Args:
        title: what the kernel computes.
        kernel: the kernel that is looked at.
        launch: runs the launcher on operands of a dtype.
        dtypes: of operands.
        required: instructions besides those of a product.
        is_small: whether a tile has too few rows for the larger matrix instruction.
        is_product: whether the kernel multiplies matrices.
        calls: sizes for :func:`drawn_once`, which is checked in bfloat16. Tiles of wider dtypes are so small
            that threads outnumber Philox calls, and some make the same one.

    """
    for one in dtypes:
        mma = one.small_mma if is_small else one.mma
        yield Check(
            f"{title}, {one.name}",
            kernel,
            functools.partial(launch, one.dtype),
            {
                capability: (*required, *([mma[capability]] if is_product else ()))
                for capability in CAPABILITIES
            },
            limit=functools.partial(drawn_once, sizes=calls) if calls and one is BFLOAT16 else lambda _: "",
            tf32=one is TFLOAT32,
        )


def product(make: Callable[..., Launch], *more: Any, positions: int = 1, **options: Any) -> Any:  # noqa: ANN401  passed on
    """Return a function that launches a product of SIZES in a dtype, with its default tile sizes.

    Args:
        make: a function of :mod:`impls.kernels.launches`.
        more: its further arguments.
        positions: of a member.
        options: its further options.

    """
    return lambda dtype: make(Operands(SIZES, dtype, META, positions=positions), *more, **options)(None)


PHILOX = ("mul.hi.u32",)
"""Instructions of Philox."""

MULTIPLICATIONS = 20
"""Wide multiplications of a Philox call; fewer where calls of a thread share a member or an element."""


def drawn_once(found: Compiled, sizes: Sequence[str]) -> str:
    """Check that each Philox call is made by one thread only.

    Args:
        found: the compiled kernel.
        sizes: names of the arguments whose product is the number of calls in a step, or of values where CALLS
            is not among them.

    """
    given = found.arguments
    values = 1 if "CALLS" in sizes else SIGNS if given["SIGN"] else NORMALS
    calls = math.prod(given[name] for name in sizes) / values
    calls *= (1 if given.get("WHOLE", True) else 2) / (32 * found.num_warps)
    multiplications = found.ptx.count("mul.hi.u32") + found.ptx.count("mul.wide.u32")
    # Addresses take a few more.
    most = int(MULTIPLICATIONS * max(1, calls)) + 4
    return f"has {multiplications} wide multiplications, more than {most}" if multiplications > most else ""


def dense_noise() -> Iterator[Check]:
    """Products with dense noise that is drawn, and sums of it."""

    def dense(dtype: torch.dtype, *, signs: bool, **sizes: int) -> None:
        to = operands(dtype, **sizes)
        dense_rng.dense_rng_product(to.x, to.weight, to.draw(), SIGMA, to.y, signs=signs)

    for signs, kind, dtypes in ((False, "normals", NORMAL_DTYPES), (True, "signs", DTYPES)):
        few = functools.partial(
            every,
            kernel=dense_rng.few_rows_kernel,
            required=PHILOX,
            is_small=True,
            calls=("MEMBERS", "BLOCK_N", "CALLS"),
        )
        for rows in (1, 2, 4):
            yield from few(
                f"drawn dense noise, {rows} rows of a member, {kind}",
                launch=functools.partial(dense, repeats=rows, signs=signs),
                dtypes=dtypes if rows == 1 else dtypes[:1],
            )
        # Rows of the weight that do not begin with a call take most registers in the widest dtype.
        yield from few(
            f"drawn dense noise, 1 row of a member, {kind}, odd inputs",
            launch=functools.partial(dense, signs=signs, inputs=1008 if signs else 1022),
            dtypes=(BFLOAT16, *dtypes[3:]),
        )
        for title, positions, some in (("many", 256, dtypes), ("64", 64, dtypes[:1])):
            yield from every(
                f"drawn dense noise, {title} rows of a member, {kind}",
                dense_rng.many_rows_kernel,
                functools.partial(dense, signs=signs, positions=positions),
                some,
                PHILOX,
                calls=("BLOCK_N", "BLOCK_K"),
            )
        draw = operands(torch.bfloat16).draw()
        yield Check(
            f"sum of drawn {kind}, bfloat16",
            dense_rng.noise_sum_kernel,
            functools.partial(dense_rng.noise_sum, draw, empty(1024), 2**20, signs=signs),
            dict.fromkeys(CAPABILITIES, PHILOX),
            limit=functools.partial(drawn_once, sizes=["CALLS"]),
        )
        yield Check(
            f"drawn {kind} written out, bfloat16",
            philox.fill_kernel,
            functools.partial(philox.fill, empty(1024, 2**20), draw, signs=signs),
            dict.fromkeys(CAPABILITIES, PHILOX),
        )


def low_rank() -> Iterator[Check]:
    """Products with low-rank noise, stored and drawn."""
    for rank in (1, 4, 8, lowrank_rng.MAX_RANK):
        yield from every(
            f"low rank, rank {rank}",
            lowrank.low_rank_kernel,
            product(launches.low_rank, rank),
            DTYPES if rank != 8 else DTYPES[:1],  # noqa: PLR2004  ranks between others
            is_small=lowrank.default_tiling(rank).block_m < 64,  # noqa: PLR2004  rows of the larger matrix instruction
        )

    def down(dtype: torch.dtype, rank: int, *, signs: bool) -> None:
        to = operands(dtype, 8192)
        lowrank_rng.down_product(to.x, to.draw(), rank, signs=signs)

    most = lowrank_rng.MAX_RANK
    for signs, kind, dtypes in ((False, "normals", NORMAL_DTYPES), (True, "signs", DTYPES)):
        wider = [one for one in dtypes if one is not TFLOAT32]
        for rank, each in ((1, wider), (4, wider[:1]), (most, wider)):
            yield from every(
                f"drawn low rank, down, rank {rank}, {kind}",
                lowrank_rng.low_rank_down_kernel,
                functools.partial(down, rank=rank, signs=signs),
                each,
                PHILOX,
                is_product=False,
                calls=("MEMBERS", "RANK", "CALLS"),
            )
        for rank, positions, some in (
            (1, 1, dtypes),
            (4, 1, dtypes[:1]),
            (most, 1, dtypes[:1]),
            (1, 64, dtypes[:1]),
            (most, 64, dtypes[1:]),
        ):
            # Signs of ``up`` are drawn by each thread that has a row of theirs: cheaper than exchange.
            yield from every(
                f"drawn low rank, up, rank {rank}, {kind}{', images' if positions > 1 else ''}",
                lowrank_rng.low_rank_up_kernel,
                product(launches.drawn_low_rank, rank, signs=signs, positions=positions),
                some,
                PHILOX,
                calls=() if signs or positions > 1 else ("BLOCK_M", "BLOCK_N"),
            )


def dropped() -> Iterator[Check]:
    """Products with dropout; antithetic ones read the factors of gates, as all do in float64."""
    for off, kind, dtypes in ((0.0, "plain", NORMAL_DTYPES), (1.0, "antithetic", DTYPES)):
        for side, kernel in (("in", dropout.dropped_inputs_kernel), ("out", dropout.dropped_outputs_kernel)):
            launch = product(launches.dropped, off=off, side=side)
            yield from every(f"dropout of {side}puts, {kind}", kernel, launch, dtypes)
        for side, cuts in (
            ("blocks of inputs", (1, 2)),
            ("16 blocks of both sides", (blocks.MAX_BLOCKS,) * 2),
        ):
            launch = product(launches.dropped_blocks, *cuts, 8, off=off)
            yield from every(f"dropout of {side}, {kind}", blocks.kept_blocks_kernel, launch, dtypes)


def shared_cores() -> Iterator[Check]:
    """Products with flipped, Hadamard, permuted and sparse noise."""
    for side, some in (("in", DTYPES[:1]), ("out", DTYPES[:1]), ("both", DTYPES)):
        yield from every(f"flipped, side {side}", flipped.flipped_kernel, product(launches.flips, side), some)
    yield from every("Hadamard", hadamard.hadamard_kernel, product(launches.hadamard_noise))
    small = hadamard.TILING._replace(block_m=64, block_n=64, num_warps=4)
    yield from every(
        "Hadamard, one block",
        hadamard.hadamard_kernel,
        lambda dtype: launches.hadamard_noise(operands(dtype, 8192))(small),
        DTYPES[:1],
    )
    yield from every("two products", permuted.added_kernel, product(launches.two_products, 1024))
    yield Check(
        "picks, bfloat16",
        permuted.pick_kernel,
        lambda: permuted.picked_rows(operands(torch.bfloat16, 8192).x, empty(8192, 1024, dtype=torch.int64)),
        dict.fromkeys(CAPABILITIES, ("ld.global", "st.global.v4")),
    )
    for kept, sigma, some in (
        (1, SIGMA, DTYPES[:1]),
        (2, empty(1), DTYPES[:1]),
        (sparse.MAX_COLUMNS, SIGMA, DTYPES),
    ):
        launch = product(launches.sparse_noise, kept, sigma)
        yield from every(f"sparse noise, k = {kept}", sparse.sparse_kernel, launch, some)
    rows = sparse.Sorted(empty(8192, dtype=torch.int64), empty(1025, dtype=torch.int32))
    yield Check(
        "sums of sparse noise, bfloat16",
        sparse.column_sums_kernel,
        lambda: sparse.column_sums(rows, empty(8192, 1, 1024), empty(8192)),
        dict.fromkeys(CAPABILITIES, ("ld.global.v4",)),
    )


def sums() -> Iterator[Check]:
    """Weighted sums of outer products."""

    def launch(dtype: torch.dtype, **options: Any) -> None:  # noqa: ANN401  passed on
        launches.outer_products(Operands((1024, 1024, 8192), dtype, META), **options)(None)

    kinds: Sequence[tuple[str, dict[str, Any], Sequence[Dtype]]] = (
        ("factors", {"signs": False}, DTYPES),
        ("signs", {"signs": True}, NORMAL_DTYPES),
        ("signs around a core", {"signs": True, "is_cored": True}, DTYPES[:1]),
        ("signs around many cores", {"signs": True, "is_cored": True, "cores": 4}, DTYPES),
        ("signs around a Hadamard matrix", {"signs": True, "is_hadamard": True}, DTYPES[:1]),
    )
    for title, options, dtypes in kinds:
        yield from every(
            f"weighted outer products, {title}",
            outer.weighted_outer_kernel,
            functools.partial(launch, **options),
            dtypes,
        )
    yield Check(
        "parts of a sum, bfloat16",
        outer.add_parts_kernel,
        functools.partial(launch, torch.bfloat16, signs=False),
        dict.fromkeys(CAPABILITIES, ("ld.global.v4",)),
    )


WORDS = "words of 64 bits"


def packed(*shape: int, axis: int) -> Tensor:
    """Return packed bits of this shape without data."""
    sizes = [size // 64 if at == axis else size for at, size in enumerate(shape)]
    return empty(*sizes, dtype=torch.int64)


def bit_products() -> Iterator[Check]:
    """Products of packed bits."""

    def popcounts(found: Compiled, *, is_wide: bool) -> str:
        """Check for one popc for each word and row of a thread, and 16-byte loads that read a weight once."""
        per_thread = binary_matmul.POPCOUNT_BLOCK_K * binary_matmul.POPCOUNT_BLOCK_N // (32 * found.num_warps)
        expected = found.arguments["BLOCK_M"] * per_thread
        if (count := found.count("popc.b32")) != expected:
            return f"has {count} popc.b32 instead of {expected}"
        loads = found.count("ld.global.v4.b32")
        if is_wide and loads != per_thread // 4:
            return f"has {loads} wide loads instead of {per_thread // 4}"
        return ""

    def multiply(kernel: Callable[..., Tensor], rows: int, dtype: torch.dtype) -> None:
        x, weight = packed(1024, rows, 1088, axis=2), packed(1024, 1088, 1024, axis=1)
        kernel(x, weight, 1088, dtype)

    for rows, dtype in ((1, torch.int32), (4, torch.int32), (1, torch.bfloat16)):
        yield Check(
            f"bits, product of {rows} rows in {str(dtype).removeprefix('torch.')}, {WORDS}",
            binary_matmul.bit_product_kernel,
            functools.partial(multiply, binary_matmul.bit_product, rows, dtype),
            dict.fromkeys(CAPABILITIES, ("popc.b32",)),
            limit=functools.partial(popcounts, is_wide=rows == 1),
        )
    for rows, dtype in ((16, torch.int32), (64, torch.int32), (128, torch.int32), (128, torch.bfloat16)):
        yield Check(
            f"bits, product of {rows} rows as int8 in {str(dtype).removeprefix('torch.')}, {WORDS}",
            binary_matmul.int8_product_kernel,
            functools.partial(multiply, binary_matmul.int8_product, rows, dtype),
            {80: (r"mma\.sync\S*\.s8\.s8",), 90: (r"wgmma\.mma_async\S*\.s8\.s8",)},
            forbidden=("st.shared.b8", "prmt"),  # four bits are unpacked at a time
        )


def drawn_bits() -> Iterator[Check]:
    """Members whose bits are drawn, and sums of them."""
    for title, shape in (
        ("whole calls of Philox", (16, 512)),
        ("parts of calls of Philox", (16, 511)),
        ("few words", (1, 32)),
    ):
        yield Check(
            f"bits, members drawn, {title}",
            binary.sample_bits_kernel,
            functools.partial(
                binary.sample_bits, empty(9, *shape, dtype=torch.int64), (1, 2), 3, 4, range(1024)
            ),
        )
    for dtype, taps in ((torch.float32, ()), (torch.float64, ()), (torch.float32, (3, 3))):
        title = f"sum about the mean{' of nine taps' if taps else ''}"
        yield Check(
            f"bits, {title} in {str(dtype).removeprefix('torch.')}, {WORDS}",
            binary.centred_sum_kernel,
            functools.partial(
                binary.centred_sum,
                packed(1024, 1, *taps, 1024, 1024, axis=2 + len(taps)),
                empty(1024, dtype=dtype),
                empty(1, 1024, 1024, *taps, dtype=dtype),
            ),
            forbidden=("atom", "red"),
        )
    yield Check(
        f"bits, planes of probabilities, {WORDS}",
        binary.bit_planes_kernel,
        functools.partial(binary.bit_planes, empty(1, 1024, 1024, dtype=torch.float32)),
    )


def device_keys() -> Iterator[Check]:
    """The hash of a step on the device, and kernels that read their key from memory."""
    step = empty(dtype=torch.int64)
    yield Check(
        "round keys of a step on the device",
        philox.round_keys_kernel,
        lambda: philox.round_keys(7, step, 10, (1, 2)),
    )
    to, images = operands(torch.bfloat16), operands(torch.bfloat16, positions=64)
    x, weight, y = to.x, to.weight, to.y
    key = to.draw()._replace(key=empty(10, 2, dtype=torch.int64))
    planes = empty(9, 16, 512, dtype=torch.int64)
    dense, up = dense_rng.dense_rng_product, lowrank_rng.low_rank_rng_product
    kernels: Sequence[tuple[str, Any, Callable[[], object]]] = (
        ("drawn dense noise, 1 row", dense_rng.few_rows_kernel, lambda: dense(x, weight, key, SIGMA, y)),
        (
            "drawn dense noise, many rows",
            dense_rng.many_rows_kernel,
            lambda: dense(images.x, weight, key, SIGMA, images.y),
        ),
        (
            "sum of drawn normals",
            dense_rng.noise_sum_kernel,
            lambda: dense_rng.noise_sum(key, empty(1024), 2**20),
        ),
        (
            "drawn low rank, down",
            lowrank_rng.low_rank_down_kernel,
            lambda: lowrank_rng.down_product(x, key, 1),
        ),
        (
            "drawn low rank, up",
            lowrank_rng.low_rank_up_kernel,
            lambda: up(x, weight, key, key, 1, SIGMA, y),
        ),
        ("bits, members drawn", binary.sample_bits_kernel, lambda: binary.sample_bits(planes, *key)),
    )
    for title, kernel, launch in kernels:
        yield Check(f"{title}, key in memory, bfloat16", kernel, launch)


@functools.cache
def checks() -> tuple[Check, ...]:
    """Return all checks."""
    groups = (dense_noise, low_rank, dropped, shared_cores, sums, bit_products, drawn_bits, device_keys)
    return tuple(check for group in groups for check in group())


# --- The command. ---


def run(some: Sequence[Check], capabilities: Sequence[int]) -> tuple[Compilations, list[str]]:
    """Compile for each capability; return the records of the report, and the errors.

    What does not compile is recorded with its reason.
    """
    wrong: list[str] = []
    found: list[Compilation] = []
    refused: list[Refused] = []
    for check in some:
        for capability in capabilities:
            names = {"title": check.title, "kernel": check.kernel.__name__, "capability": capability}
            try:
                one = compile_check(check, capability)
            except Exception as error:  # noqa: BLE001  whatever the compiler or the assembler raises is the reason
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                refused.append(Refused(**names, reason=reason))
                wrong.append(f"{check.title} does not compile for {capability}: {reason}")
                continue
            wrong += (f"{check.title} for {capability} {text}" for text in check.problems(capability, one))
            found.append(
                Compilation(
                    **names,
                    warps=one.num_warps,
                    stages=one.num_stages,
                    registers=one.registers,
                    shared_bytes=one.shared_bytes,
                    spilled_bytes=one.spilled_bytes,
                )
            )
    package = Path(impls.__file__).parent
    compilations = Compilations(
        schema=SCHEMA,
        triton=triton.__version__,
        commit=git.commit(package),
        dirty=git.is_dirty(package),
        found=tuple(found),
        refused=tuple(refused),
    )
    return compilations, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, write the file, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m impls.kernels.compile_checks",
        description="Compile every kernel for GPUs that need not be present; check registers and memory.",
    )
    parser.add_argument("--out", type=Path, default=Path("results") / FILE, help="file to write")
    parser.add_argument(
        "--capability", type=int, action="append", help="90 for 9.0; repeatable; by default 80 and 90"
    )
    parser.add_argument("--kernels", default="*", help="glob over the titles of checks, such as 'low rank*'")
    asked = parser.parse_args(arguments)
    if not hasattr(triton, "__version__"):
        sys.stderr.write("kernels: triton, which is for Linux only, is not installed here\n")
        return 2
    some = [one for one in checks() if fnmatchcase(one.title, asked.kernels)]
    compilations, wrong = run(some, asked.capability or CAPABILITIES)
    store.write_document(compilations, asked.out)
    for problem in wrong:
        sys.stderr.write(f"kernels: {problem}\n")
    sys.stderr.write(f"kernels: {len(compilations.found)} compiled, written to {asked.out}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
