"""Compile every kernel for GPUs that need not be present: ``python -m impls.kernels.compile_checks``.

Each check calls a launcher with tensors of the device ``meta``, compiles the kernel instead of launching it,
and looks at the code: instructions that make it fast, spilled registers and shared memory.
``nox -s kernels`` runs all checks and writes the registers and sizes for the report; the tests run one check
of each kernel.

Exit codes: 0 done; 1 a check fails; 2 triton is not installed.
"""

import argparse
import functools
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import impls
from esbench import git, store
from esbench.studies.kernels import FILE, SCHEMA, Compilation, Compilations, Refused
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
"""Largest shared memory of a program, by capability."""

META = torch.device("meta")

WGMMA, MMA = "wgmma.mma_async", "mma.sync"
"""Instructions of tensor cores: of capability 9.0 for at least 64 rows, and of earlier ones or fewer rows."""

PHILOX = ("mul.hi.u32",)
"""The instruction that shows that a kernel draws Philox noise."""

MULTIPLICATIONS = 20
"""Wide multiplications of a Philox call; fewer where calls of a thread share a member or an element."""


class Dtype(NamedTuple):
    """A dtype of operands: its name in titles, and the instruction that a product compiles to."""

    name: str
    dtype: torch.dtype
    instruction: str


BFLOAT16 = Dtype("bfloat16", torch.bfloat16, WGMMA)
# Matrix units have no float32; for float64 capability 9.0 has the older instruction only.
FLOAT32 = Dtype("float32", torch.float32, "fma.rn.f32")
TFLOAT32 = Dtype("tfloat32", torch.float32, WGMMA)
FLOAT64 = Dtype("float64", torch.float64, MMA)
NORMAL_DTYPES = (BFLOAT16, FLOAT32, TFLOAT32)
"""Dtypes of kernels that draw normals, which are float32."""
DTYPES = (*NORMAL_DTYPES, FLOAT64)


class Compiled(NamedTuple):
    """The code of a kernel: its assembly, its resources and the keyword arguments of the launch."""

    ptx: str
    usage: Compilation
    arguments: Mapping[str, Any] = {}

    def count(self, instruction: str) -> int:
        """Count instructions that begin with a regular expression; those of a loop count once."""
        return len(re.findall(rf"^\s*(?:@\S+\s+)?{instruction}", self.ptx, re.MULTILINE))


@dataclass(frozen=True, eq=False)
class Check:
    """A launch, and the instructions that its kernel must contain.

    Attributes:
        title: unique; ends with the dtype.
        kernel: the kernel that is compiled; other kernels of the launch are ignored.
        launch: calls a launcher with meta tensors.
        required: regular expressions of instructions that must occur. WGMMA stands for MMA before 9.0.
        forbidden: instructions that must not occur.
        calls: names of the arguments with the numbers of Philox calls in a step, or of values if CALLS is not
            among them. If given, each call must be made by one thread only.
        tf32: whether float32 products use TF32.

    """

    title: str
    kernel: Any
    launch: Callable[[], object]
    required: Sequence[str] = ()
    forbidden: Sequence[str] = ()
    calls: Sequence[str] = ()
    tf32: bool = False

    def problems(self, compiled: Compiled) -> list[str]:
        """Return the faults of the compiled code."""
        usage = compiled.usage
        is_hopper = usage.capability >= 90  # noqa: PLR2004  9.0
        required = [name if is_hopper else name.replace(WGMMA, MMA) for name in self.required]
        problems = [f"has no {name}" for name in required if not compiled.count(name)]
        problems += [f"has {name}" for name in self.forbidden if compiled.count(name)]
        if usage.spilled_bytes:
            problems.append(f"spills {usage.spilled_bytes} bytes")
        if usage.shared_bytes > MAX_SHARED_BYTES[usage.capability]:
            problems.append(f"needs {usage.shared_bytes} bytes of shared memory")
        multiplications = compiled.ptx.count("mul.hi.u32") + compiled.ptx.count("mul.wide.u32")
        if self.calls and multiplications > (most := self.max_multiplications(compiled)):
            problems.append(f"has {multiplications} wide multiplications, more than {most}")
        return problems

    def max_multiplications(self, compiled: Compiled) -> int:
        """Return the wide multiplications of a thread if no two threads make the same Philox call."""
        arguments = compiled.arguments
        values = 1 if "CALLS" in self.calls else SIGNS if arguments["SIGN"] else NORMALS
        calls = math.prod(arguments[name] for name in self.calls) / values
        calls *= (1 if arguments.get("ALIGNED", True) else 2) / (32 * compiled.usage.warps)
        return int(MULTIPLICATIONS * max(1, calls)) + 4  # addresses take a few more


@functools.cache
def compile_check(check: Check, capability: int) -> Compiled:
    """Compile the kernel of a check for a GPU of this capability.

    Raises:
        triton.TritonError: the kernel does not compile.

    """
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415  triton need not be there
    from triton.runtime import driver  # noqa: PLC0415  triton need not be there
    from triton.runtime.jit import KernelInterface  # noqa: PLC0415  triton need not be there

    no_gpu = SimpleNamespace(
        # Triton caches compiled kernels by device.
        get_current_device=lambda: capability,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    compiled: list[Compiled] = []

    def launch(kernel: Any, grid: object) -> Callable[..., None]:  # noqa: ANN401  Triton's functions have no type
        def compile_kernel(*operands: object, **arguments: Any) -> None:  # noqa: ANN401  Triton's functions have no type
            if kernel is not check.kernel:
                return
            built = kernel.warmup(*operands, grid=grid, **arguments)
            registers, spilled = resource_usage(built.asm["cubin"])
            usage = Compilation(
                title=check.title,
                kernel=kernel.__name__,
                capability=capability,
                warps=built.metadata.num_warps,
                stages=built.metadata.num_stages,
                registers=registers,
                shared_bytes=built.metadata.shared,
                spilled_bytes=spilled,
            )
            compiled.append(Compiled(built.asm["ptx"], usage, arguments))

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
    """Return the registers and the stack bytes, which are spilled registers, of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  triton's own
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", text))
    return int(numbers["REG"]), int(numbers["STACK"])


# Checks


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device=META)


def operands(dtype: torch.dtype, members: int = 8192, inputs: int = 1024, **sizes: int) -> Operands:
    """Return operands of a layer with 1024 outputs."""
    return Operands((members, 1024, inputs), dtype, META, **sizes)


def launch_default(make: Callable[[Operands], Launch], dtype: torch.dtype, sizes: Mapping[str, int]) -> None:
    """Launch a kernel with its default tile sizes on operands of these sizes."""
    make(operands(dtype, **sizes))(None)


def per_dtype(
    title: str,
    kernel: Any,  # noqa: ANN401  Triton's functions have no type
    make: Callable[[Operands], Launch],
    dtypes: Sequence[Dtype] = DTYPES,
    *,
    required: Sequence[str] = (),
    tile_rows: int = 64,
    calls: Sequence[str] = (),
    **sizes: int,
) -> Iterator[Check]:
    """Return a check of the same launch for each dtype, with default tile sizes.

    Args:
        title: of the checks, without the dtype.
        kernel: the kernel that is compiled.
        make: make a launch, as the functions of :mod:`impls.kernels.launches` do.
        dtypes: of operands.
        required: instructions besides those of a product.
        tile_rows: rows of a tile of the product, which needs 64 for WGMMA; 0 if the kernel has no product.
        calls: see :class:`Check`; for bfloat16 only. Tiles of wider dtypes are so small that threads
            outnumber Philox calls, and some make the same one.
        sizes: arguments of :func:`operands`.

    """
    for name, dtype, instruction in dtypes:
        products = [instruction if tile_rows >= 64 else instruction.replace(WGMMA, MMA)]  # noqa: PLR2004  rows of WGMMA
        yield Check(
            f"{title}, {name}",
            kernel,
            functools.partial(launch_default, make, dtype, sizes),
            [*required, *(products if tile_rows else ())],
            calls=calls if dtype is torch.bfloat16 else (),
            tf32=name == "tfloat32",
        )


def dense_noise() -> Iterator[Check]:
    """Products with dense noise that is drawn, and sums of it."""

    def dense(to: Operands, *, signs: bool) -> Launch:
        return lambda _: dense_rng.dense_rng_product(to.x, to.weight, to.draw(), SIGMA, to.y, signs=signs)

    draw = operands(torch.bfloat16, 1024).draw()
    for signs, values, dtypes in ((False, "normals", NORMAL_DTYPES), (True, "signs", DTYPES)):
        check = functools.partial(per_dtype, make=functools.partial(dense, signs=signs), required=PHILOX)
        title, kernel = f"drawn dense {values}", dense_rng.few_rows_kernel
        few = functools.partial(check, members=1024, tile_rows=16, calls=("MEMBERS", "BLOCK_N", "CALLS"))
        yield from few(f"{title}, 1 row of a member", kernel, dtypes=dtypes)
        for repeats in (2, 4):
            yield from few(f"{title}, {repeats} rows of a member", kernel, dtypes=dtypes[:1], repeats=repeats)
        # Rows of the weight that do not begin with a call take most registers in the widest dtype.
        odd, widest = 1008 if signs else 1022, (BFLOAT16, *dtypes[3:])
        yield from few(f"{title}, 1 row, odd inputs of a member", kernel, dtypes=widest, inputs=odd)
        many = functools.partial(check, members=1024, calls=("BLOCK_N", "BLOCK_K"))
        for positions, some in ((256, dtypes), (64, dtypes[:1])):
            yield from many(
                f"{title}, {positions} rows of a member",
                dense_rng.many_rows_kernel,
                dtypes=some,
                positions=positions,
            )
        yield Check(
            f"sum of drawn {values}, bfloat16",
            dense_rng.noise_sum_kernel,
            functools.partial(dense_rng.noise_sum, draw, empty(1024), 2**20, signs=signs),
            PHILOX,
            calls=["CALLS"],
        )
        yield Check(
            f"drawn {values} written out, bfloat16",
            philox.fill_kernel,
            functools.partial(philox.fill, empty(1024, 2**20), draw, signs=signs),
            PHILOX,
        )


def low_rank() -> Iterator[Check]:
    """Products with low-rank noise, stored and drawn."""
    most = lowrank_rng.MAX_RANK
    some: Sequence[Dtype]
    for rank, some in ((1, DTYPES), (4, DTYPES), (8, DTYPES[:1]), (most, DTYPES)):
        make = functools.partial(launches.low_rank, rank=rank)
        rows = lowrank.default_tiling(rank).block_m
        yield from per_dtype(f"low rank, rank {rank}", lowrank.low_rank_kernel, make, some, tile_rows=rows)

    def down(to: Operands, rank: int, *, signs: bool) -> Launch:
        return lambda _: lowrank_rng.down_product(to.x, to.draw(), rank, signs=signs)

    for signs, values, dtypes in ((False, "normals", NORMAL_DTYPES), (True, "signs", DTYPES)):
        without_tf32 = [dtype for dtype in dtypes if dtype is not TFLOAT32]
        check = functools.partial(per_dtype, kernel=lowrank_rng.low_rank_down_kernel, required=PHILOX)
        for rank, some in ((1, without_tf32), (4, without_tf32[:1]), (most, without_tf32)):
            yield from check(
                f"drawn low rank, down, rank {rank}, {values}",
                make=functools.partial(down, rank=rank, signs=signs),
                dtypes=some,
                tile_rows=0,
                calls=("MEMBERS", "RANK", "CALLS"),
            )
        check = functools.partial(per_dtype, kernel=lowrank_rng.low_rank_up_kernel, required=PHILOX)
        # Each thread draws the signs of ``up`` for its own rows, which is cheaper than exchange.
        calls = () if signs else ("BLOCK_M", "BLOCK_N")
        for rank, some in ((1, dtypes), (4, dtypes[:1]), (most, dtypes[:1])):
            make = functools.partial(launches.drawn_low_rank, rank=rank, signs=signs)
            title = f"drawn low rank, up, rank {rank}, {values}"
            yield from check(title, make=make, dtypes=some, calls=calls)
        for rank, some in ((1, dtypes[:1]), (most, dtypes[1:])):
            make = functools.partial(launches.drawn_low_rank, rank=rank, signs=signs)
            title = f"drawn low rank, up, rank {rank}, {values}, images"
            yield from check(title, make=make, dtypes=some, positions=64)


def dropout_masks() -> Iterator[Check]:
    """Products with dropout; antithetic ones read the factors of gates, as all do in float64."""
    for off, name, dtypes in ((0.0, "plain", NORMAL_DTYPES), (1.0, "antithetic", DTYPES)):
        for side in ("in", "out"):
            make: Any = functools.partial(launches.dropout_product, off=off, side=side)
            yield from per_dtype(f"dropout of {side}puts, {name}", dropout.dropped_kernel, make, dtypes)
        for side, out, inner in (
            ("blocks of inputs", 1, 2),
            ("16 blocks of both sides", blocks.MAX_BLOCKS, blocks.MAX_BLOCKS),
        ):
            make = functools.partial(launches.block_dropout_product, out=out, inner=inner, groups=8, off=off)
            yield from per_dtype(f"dropout of {side}, {name}", blocks.kept_blocks_kernel, make, dtypes)


def shared_cores() -> Iterator[Check]:
    """Products with flipped, Hadamard, permuted and sparse noise."""
    for side, dtypes in (("in", DTYPES[:1]), ("out", DTYPES[:1]), ("both", DTYPES)):
        make: Any = functools.partial(launches.flips, side=side)
        yield from per_dtype(f"flipped, side {side}", flipped.flipped_kernel, make, dtypes)
    yield from per_dtype("Hadamard", hadamard.hadamard_kernel, launches.hadamard_noise)
    small = hadamard.TILING._replace(block_m=64, block_n=64, num_warps=4)
    yield from per_dtype(
        "Hadamard, one block",
        hadamard.hadamard_kernel,
        lambda to: lambda _: launches.hadamard_noise(to)(small),
        DTYPES[:1],
    )
    make = functools.partial(launches.two_products, count=1024)
    yield from per_dtype("two products", permuted.permuted_kernel, make)
    yield Check(
        "picks, bfloat16",
        permuted.gather_kernel,
        lambda: permuted.gather_channels(operands(torch.bfloat16).x, empty(8192, 1024, dtype=torch.int64)),
        ("ld.global", "st.global.v4"),
    )
    for count, sigma, dtypes in (
        (1, SIGMA, DTYPES[:1]),
        (2, empty(1), DTYPES[:1]),
        (sparse.MAX_COLUMNS, SIGMA, DTYPES),
    ):
        make = functools.partial(launches.sparse_noise, count=count, sigma=sigma)
        yield from per_dtype(f"sparse noise, k = {count}", sparse.sparse_kernel, make, dtypes)
    columns = empty(8192, 1, dtype=torch.int64)
    yield Check(
        "sums of sparse noise, bfloat16",
        sparse.column_sums_kernel,
        lambda: sparse.column_sums(columns, empty(8192, 1, 1024), empty(8192), 1024),
        ("ld.global.v4",),
    )


def sums() -> Iterator[Check]:
    """Weighted sums of outer products."""
    updates: Sequence[tuple[str, dict[str, Any], Sequence[Dtype]]] = (
        ("factors", {}, DTYPES),
        ("signs", {"signs": True}, NORMAL_DTYPES),
        ("signs around a core", {"signs": True, "is_cored": True}, DTYPES),
        ("signs around a Hadamard matrix", {"signs": True, "is_hadamard": True}, DTYPES[:1]),
    )
    # The operands of a sum have sizes outputs, inputs and rows.
    check = functools.partial(per_dtype, members=1024, inputs=8192)
    for title, options, dtypes in updates:
        make = functools.partial(launches.outer_products, **options)
        title = f"weighted outer products, {title}"  # noqa: PLW2901  completed
        yield from check(title, outer.weighted_outer_kernel, make, dtypes)
    yield from check(
        "parts of a sum",
        outer.add_parts_kernel,
        launches.outer_products,
        DTYPES[:1],
        required=("ld.global.v4",),
        tile_rows=0,
    )


def packed_bits() -> Iterator[Check]:
    """Products of packed bits, members that draw them, and sums."""

    def words(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int64)

    def multiply(kernel: Callable[..., Tensor], rows: int, dtype: torch.dtype) -> None:
        kernel(words(1024, rows, 17), words(1024, 17, 1024), 1088, dtype)

    for rows, dtype in ((1, torch.int32), (4, torch.int32), (1, torch.bfloat16)):
        yield Check(
            f"bits, product of {rows} rows by popcount, {str(dtype).removeprefix('torch.')}",
            binary_matmul.bit_product_kernel,
            functools.partial(multiply, binary_matmul.bit_product, rows, dtype),
            ("popc.b32", "ld.global.v4.b32"),
        )
    for rows, dtype in ((16, torch.int32), (64, torch.int32), (128, torch.int32), (128, torch.bfloat16)):
        yield Check(
            f"bits, product of {rows} rows as int8, {str(dtype).removeprefix('torch.')}",
            binary_matmul.int8_product_kernel,
            functools.partial(multiply, binary_matmul.int8_product, rows, dtype),
            (rf"{WGMMA}\S*\.s8\.s8",),
            forbidden=("st.shared.b8", "prmt"),  # four bits are unpacked at a time
        )
    draw = operands(torch.bfloat16, 1024).draw()
    for title, shape in (("whole calls", (16, 512)), ("parts of calls", (16, 511)), ("few words", (1, 32))):
        launch = functools.partial(binary.sample_bits, words(9, *shape), *draw)
        yield Check(f"bits, members drawn, {title}", binary.sample_bits_kernel, launch, PHILOX)
    for dtype, taps in ((torch.float32, ()), (torch.float64, ()), (torch.float32, (3, 3))):
        p = empty(1, 1024, 1024, *taps, dtype=dtype)
        yield Check(
            f"bits, sum about the mean{', nine taps' if taps else ''}, {str(dtype).removeprefix('torch.')}",
            binary.centered_sum_kernel,
            functools.partial(
                binary.centered_sum, words(1024, 1, *taps, 16, 1024), empty(1024, dtype=dtype), p
            ),
            forbidden=("atom", "red"),
        )
    launch = functools.partial(binary.bit_planes, empty(1, 1024, 1024, dtype=torch.float32))
    yield Check("bits, planes of probabilities", binary.bit_planes_kernel, launch)


def device_keys() -> Iterator[Check]:
    """The kernel that hashes a step in device memory to Philox keys, and one that reads such keys."""
    step, to = empty(dtype=torch.int64), operands(torch.bfloat16, 1024)
    draw = to.draw()._replace(key=empty(10, 2, dtype=torch.int64))
    yield Check("keys of a step", philox.round_keys_kernel, lambda: philox.round_keys(7, step, 10, (1, 2)))
    yield Check(
        "drawn dense normals, 1 row of a member, key in memory, bfloat16",
        dense_rng.few_rows_kernel,
        lambda: dense_rng.dense_rng_product(to.x, to.weight, draw, SIGMA, to.y),
        PHILOX,
    )


@functools.cache
def checks() -> tuple[Check, ...]:
    """Return all checks."""
    groups = (dense_noise, low_rank, dropout_masks, shared_cores, sums, packed_bits, device_keys)
    return tuple(check for group in groups for check in group())


# The command


def run(some: Sequence[Check], capabilities: Sequence[int]) -> tuple[Compilations, list[str]]:
    """Compile for each capability; return the records of the report, and the problems.

    A launch that does not compile is recorded with the reason.
    """
    problems: list[str] = []
    compilations: list[Compilation] = []
    refused: list[Refused] = []
    for check in some:
        for capability in capabilities:
            try:
                compiled = compile_check(check, capability)
            except Exception as error:  # noqa: BLE001  any error of the compiler or the assembler is the reason
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                names = {"title": check.title, "kernel": check.kernel.__name__, "reason": reason}
                refused.append(Refused(**names, capability=capability))
                problems.append(f"{check.title} does not compile for {capability}: {reason}")
                continue
            problems += (f"{check.title} for {capability} {text}" for text in check.problems(compiled))
            compilations.append(compiled.usage)
    package = Path(impls.__file__).parent
    document = Compilations(
        schema=SCHEMA,
        triton=triton.__version__,
        commit=git.commit(package),
        dirty=git.is_dirty(package),
        found=tuple(compilations),
        refused=tuple(refused),
    )
    return document, problems


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
    options = parser.parse_args(arguments)
    if not hasattr(triton, "__version__"):
        sys.stderr.write("kernels: triton, which is for Linux only, is not installed here\n")
        return 2
    some = [check for check in checks() if fnmatchcase(check.title, options.kernels)]
    document, problems = run(some, options.capability or CAPABILITIES)
    store.write_document(document, options.out)
    for problem in problems:
        sys.stderr.write(f"kernels: {problem}\n")
    sys.stderr.write(f"kernels: {len(document.found)} compiled, written to {options.out}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
