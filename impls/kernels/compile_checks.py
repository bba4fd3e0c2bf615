"""Compile every kernel for GPUs that need not be present: ``python -m impls.kernels.compile_checks``.

Each check calls a launcher with tensors of the device ``meta`` and compiles the kernel instead of launching.
The code must use tensor cores where the dtype has them, spill no registers, fit into shared memory, and agree
with the committed record (:mod:`impls.kernels.record`), which ``--record`` renews. ``nox -s kernels``
runs all checks; the tests run one check of each kernel.

Exit codes: 0 done; 1 a check fails; 2 triton is not installed.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from esbench import compiled as compiled_kernels
from esbench.compiled import CompiledKernel, Record
from impls.kernels import (
    binary,
    binary_matmul,
    blocks,
    dense_rng,
    gemm,
    hadamard,
    launches,
    lowrank_rng,
    outer,
    permuted,
    philox,
    record,
    sparse,
)
from impls.kernels.launches import SIGMA, Launch, Operands
from impls.kernels.machine_code import code_of, resource_usage
from impls.kernels.optional_triton import TensorDescriptor, triton

CAPABILITIES = (80, 90)
"""Compute capabilities that kernels are compiled for: 90 is 9.0."""

RECORDED = 90
"""The capability of the committed record, which is that of the goals' GPU."""

MAX_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Largest shared memory of a program, by capability."""

META = torch.device("meta")

WGMMA, MMA = "wgmma.mma_async", "mma.sync"
"""Instructions of tensor cores: of capability 9.0 for at least 64 rows, and of earlier ones or fewer rows."""


class Dtype(NamedTuple):
    """A dtype of operands: its name in titles, and the instruction that a product compiles to."""

    name: str
    dtype: torch.dtype
    instruction: str


BFLOAT16 = Dtype("bfloat16", torch.bfloat16, WGMMA)
# Tensor cores do not multiply float32; for float64 capability 9.0 has the older instruction only.
FLOAT32 = Dtype("float32", torch.float32, "fma.rn.f32")
TFLOAT32 = Dtype("tfloat32", torch.float32, WGMMA)
FLOAT64 = Dtype("float64", torch.float64, MMA)
NORMAL_DTYPES = (BFLOAT16, FLOAT32, TFLOAT32)
"""Dtypes of kernels that draw normals, which are float32."""
DTYPES = (*NORMAL_DTYPES, FLOAT64)


@dataclass(frozen=True)
class Compiled:
    """The code of a kernel: its assembly, what it spills, and what is recorded of it."""

    ptx: str
    capability: int
    spilled_bytes: int
    kernel: CompiledKernel

    def problems(self, instruction: str) -> list[str]:
        """Return the faults of the code, which must contain an instruction: a regular expression."""
        problems = []
        if self.capability < 90:  # noqa: PLR2004  9.0
            instruction = instruction.replace(WGMMA, MMA)
        if not re.search(rf"^\s*(?:@\S+\s+)?{instruction}", self.ptx, re.MULTILINE):
            problems.append(f"has no {instruction}")
        if self.spilled_bytes:
            problems.append(f"spills {self.spilled_bytes} bytes")
        if self.kernel.shared_bytes > MAX_SHARED_BYTES[self.capability]:
            problems.append(f"needs {self.kernel.shared_bytes} bytes of shared memory")
        return problems

    def changes(self, recorded: Record) -> list[str]:
        """Return how code for capability 9.0 differs from the record, see :func:`record.differences`."""
        same = recorded.triton == triton.__version__
        return record.differences(self.kernel, recorded.at(self.kernel.title), is_same_compiler=same)


class Check(NamedTuple):
    """A launch whose kernel is compiled.

    Attributes:
        title: unique; ends with the dtype.
        kernel: the kernel that is compiled; other kernels of the launch are ignored.
        launch: calls a launcher with meta tensors.
        instruction: a regular expression of an instruction that must occur. WGMMA stands for MMA before 9.0.
        tf32: whether float32 products use TF32.
    """

    title: str
    kernel: Any
    launch: Callable[[], object]
    instruction: str = ""
    tf32: bool = False

    def compile(self, capability: int) -> Compiled:
        """Compile the kernel for a GPU of this capability.

        Raises:
            triton.TritonError: the kernel does not compile.
            TypeError: it could not be launched.
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
        launches_seen: list[tuple[Any, dict[str, Any], tuple[int, ...]]] = []

        def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:  # noqa: ANN401  Triton's functions have no type
            def compile_kernel(*operands: object, **options: Any) -> None:  # noqa: ANN401  Triton's functions have no type
                if kernel is self.kernel:
                    arguments = {**dict(zip(kernel.arg_names, operands, strict=False)), **options}
                    binary = kernel.warmup(*operands, grid=grid, **options)
                    launches_seen.append((binary, arguments, grid))

            return compile_kernel

        settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
        settings.allow_tf32 = self.tf32
        try:
            with (
                patch.object(driver, "_active", no_gpu),
                patch.object(KernelInterface, "__getitem__", launch),
            ):
                self.launch()
        finally:
            settings.allow_tf32 = before
        binary, arguments, grid = launches_seen[0]
        for name, value in arguments.items():
            if isinstance(value, tuple) and any(isinstance(each, TensorDescriptor) for each in value):
                raise TypeError(
                    f"{name} is a tuple with a descriptor, which Triton compiles but cannot launch"
                )
        cubin = binary.asm["cubin"]
        registers, spilled = resource_usage(cubin)
        code = code_of(cubin, binary.asm["ttir"])
        return Compiled(
            ptx=binary.asm["ptx"],
            capability=capability,
            spilled_bytes=spilled,
            kernel=CompiledKernel(
                title=self.title,
                warps=binary.metadata.num_warps,
                registers=registers,
                shared_bytes=binary.metadata.shared,
                code=code,
                work=record.work_of(self.kernel.__name__, arguments, grid, code),
            ),
        )


# Checks


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device=META)


def layer_operands(
    dtype: torch.dtype, members: int = 8192, inputs: int = 1024, outputs: int = 1024, **sizes: int
) -> Operands:
    """Return operands of a layer, by default of the size of most goals."""
    return Operands((members, outputs, inputs), dtype, META, **sizes)


WIDE: dict[str, Any] = {"members": 1024, "inputs": 8192, "outputs": 8192}
"""Sizes of the goals for a wide layer."""


def per_dtype(
    title: str,
    kernel: Any,  # noqa: ANN401  Triton's functions have no type
    make: Callable[[Operands], Launch],
    dtypes: Sequence[Dtype] = DTYPES,
    *,
    tile_rows: int = 64,
    **sizes: int,
) -> Iterator[Check]:
    """Return a check of the same launch for each dtype, with default tile sizes.

    Args:
        title: of the checks, without the dtype.
        kernel: the kernel that is compiled.
        make: make a launch, as the functions of :mod:`impls.kernels.launches` do.
        dtypes: of operands.
        tile_rows: rows of a tile of the product, which needs 64 for WGMMA; 0 if the kernel has no product.
        sizes: arguments of :func:`layer_operands`.
    """

    def launch(dtype: torch.dtype) -> object:
        return make(layer_operands(dtype, **sizes))(None)

    for name, dtype, instruction in dtypes:
        product = instruction if tile_rows >= 64 else instruction.replace(WGMMA, MMA)  # noqa: PLR2004  rows of WGMMA
        instruction = product if tile_rows else ""  # noqa: PLW2901  chosen
        yield Check(f"{title}, {name}", kernel, partial(launch, dtype), instruction, name == "tfloat32")


DRAWN: Sequence[tuple[philox.Law, str, Sequence[Dtype], int]] = (
    ("normal", "normals", NORMAL_DTYPES, 1022),
    ("uniform", "levels", DTYPES, 1016),
    ("sign", "signs", DTYPES, 1008),
)
"""Laws of drawn noise, their names in titles, dtypes, and inputs that no number of calls gives exactly."""


def dense_noise() -> Iterator[Check]:
    """Products with dense noise that is drawn, and sums of it."""

    def dense(operands: Operands, law: philox.Law) -> Launch:
        return lambda _: dense_rng.dense_rng_product(
            operands.x, operands.weight, operands.draw(), SIGMA, operands.y, law=law
        )

    draw = layer_operands(torch.bfloat16, 1024).draw()
    for law, values, dtypes, odd in DRAWN:
        title = f"drawn dense {values}"
        check = partial(per_dtype, make=partial(dense, law=law), members=1024)
        few = partial(check, kernel=dense_rng.few_rows_kernel, tile_rows=16)
        yield from few(f"{title}, 1 row of a member", dtypes=dtypes)
        yield from few(f"{title}, 1 row of 2^20 members", dtypes=dtypes[:1], members=2**20)
        for repeats in (2, 4):
            yield from few(f"{title}, {repeats} rows of a member", dtypes=dtypes[:1], repeats=repeats)
        # Rows of the weight that do not begin with a call take most registers in the widest dtype.
        widest = (BFLOAT16, *dtypes[3:])
        yield from few(f"{title}, 1 row, odd inputs of a member", dtypes=widest, inputs=odd)
        many = partial(check, kernel=dense_rng.many_rows_kernel)
        for positions, check_dtypes in ((256, dtypes), (64, dtypes[:1])):
            yield from many(
                f"{title}, {positions} rows of a member", dtypes=check_dtypes, positions=positions
            )
        launch = partial(dense_rng.noise_sum, draw, empty(1024), 2**20, law)
        yield Check(f"sum of drawn {values}, bfloat16", dense_rng.noise_sum_kernel, launch)
        launch = partial(philox.fill, empty(1024, 2**20), draw, law=law)
        yield Check(f"drawn {values} written out, bfloat16", philox.fill_kernel, launch)
        factors = empty(8192, 1024, dtype=torch.int8 if law == "sign" else torch.bfloat16)
        launch = partial(philox.fill, factors, layer_operands(torch.bfloat16).draw(), law=law)
        yield Check(f"drawn {values} of factors written out", philox.fill_kernel, launch)


def low_rank() -> Iterator[Check]:
    """Products with low-rank noise, stored and drawn."""
    most = lowrank_rng.MAX_RANK
    check_dtypes: Sequence[Dtype]
    for rank, check_dtypes in ((1, DTYPES), (4, DTYPES), (8, DTYPES[:1]), (most, DTYPES)):
        make = partial(launches.low_rank, rank=rank)

        yield from per_dtype(f"low rank, rank {rank}", gemm.product_kernel, make, check_dtypes)
        down_kernel = partial(per_dtype, kernel=lowrank_rng.low_rank_down_kernel, make=make, tile_rows=0)
        yield from down_kernel(f"low rank, down, rank {rank}", dtypes=check_dtypes[:1])
        if rank == 1:
            yield from per_dtype("low rank, rank 1, wide", gemm.product_kernel, make, DTYPES[:1], **WIDE)
            yield from down_kernel("low rank, down, rank 1, wide", dtypes=DTYPES[:1], **WIDE)

    def down(operands: Operands, rank: int, law: philox.Law) -> Launch:
        return lambda _: lowrank_rng.down_product(operands.x, operands.draw(), rank, law=law)

    for law, values, dtypes, _ in DRAWN:
        without_tf32 = [dtype for dtype in dtypes if dtype is not TFLOAT32]
        for rank, check_dtypes in ((1, without_tf32), (4, without_tf32[:1]), (most, without_tf32)):
            title = f"drawn low rank, down, rank {rank}, {values}"
            make = partial(down, rank=rank, law=law)
            yield from per_dtype(title, lowrank_rng.low_rank_down_kernel, make, check_dtypes, tile_rows=0)
            if rank == 1:
                wide = partial(per_dtype, kernel=lowrank_rng.low_rank_down_kernel, make=make, tile_rows=0)
                yield from wide(f"{title}, wide", dtypes=dtypes[:1], **WIDE)
        for rank, check_dtypes, positions in (
            *((1, dtypes, 1), (4, dtypes[:1], 1), (most, dtypes[:1], 1)),
            *((1, dtypes[:1], 64), (most, dtypes[1:], 64)),
        ):
            title = f"drawn low rank, up, rank {rank}, {values}{', images' if positions > 1 else ''}"
            make = partial(launches.drawn_low_rank, rank=rank, law=law)
            yield from per_dtype(title, lowrank_rng.drawn_up_kernel, make, check_dtypes, positions=positions)
        title = f"drawn low rank, up, rank 1, {values}, wide"
        make = partial(launches.drawn_low_rank, rank=1, law=law)
        yield from per_dtype(title, lowrank_rng.drawn_up_kernel, make, dtypes[:1], **WIDE)


def dropout_masks() -> Iterator[Check]:
    """Products with dropout; antithetic ones read the factors of gates, as all do in float64."""
    most, make = blocks.MAX_BLOCKS, launches.block_dropout_product
    for off, name, dtypes in ((0.0, "plain", NORMAL_DTYPES), (1.0, "antithetic", DTYPES)):
        for title, kernel, launch in (
            ("inputs", gemm.product_kernel, partial(launches.dropout_product, side="in")),
            ("outputs", gemm.product_kernel, partial(launches.dropout_product, side="out")),
            ("blocks of inputs", blocks.kept_blocks_kernel, partial(make, out=1, inner=2, groups=4)),
            ("blocks of both sides", blocks.kept_blocks_kernel, partial(make, out=2, inner=2, groups=8)),
            (
                "16 blocks of both sides",
                blocks.kept_blocks_kernel,
                partial(make, out=most, inner=most, groups=8),
            ),
        ):
            yield from per_dtype(f"dropout of {title}, {name}", kernel, partial(launch, off=off), dtypes)


def shared_cores() -> Iterator[Check]:
    """Products with flipped, Hadamard, permuted and sparse noise."""
    for side, dtypes in (("in", DTYPES[:1]), ("out", DTYPES[:1]), ("both", DTYPES)):
        make: Any = partial(launches.flips, side=side)
        yield from per_dtype(f"flipped, side {side}", gemm.product_kernel, make, dtypes)
    yield from per_dtype("Hadamard, product", gemm.product_kernel, launches.hadamard_noise, NORMAL_DTYPES)
    rows = partial(per_dtype, kernel=hadamard.hadamard_rows_kernel, make=launches.hadamard_noise, tile_rows=0)
    yield from rows("Hadamard, rows of 1024", dtypes=NORMAL_DTYPES)
    for dtype, width in zip(NORMAL_DTYPES, (16384, 2048, 8192), strict=True):  # the widest rows
        yield from rows(f"Hadamard, rows of {width}", dtypes=[dtype], inputs=width)
    make = partial(launches.two_products, count=1024)
    yield from per_dtype("two products", gemm.product_kernel, make)
    make = partial(launches.two_products, count=102)
    yield from per_dtype("two products, 102 picks", gemm.product_kernel, make, DTYPES[:1])
    columns = empty(8192, 1024, dtype=torch.int64)
    for title, picks, instruction in (
        ("picks, bfloat16", columns.short(), "st.global.v4"),
        ("102 picks, bfloat16", empty(8192, 102, dtype=torch.int16), ""),
    ):
        launch: Callable[[], object] = partial(
            permuted.gather_channels, layer_operands(torch.bfloat16).x, picks, SIGMA
        )
        yield Check(title, permuted.gather_kernel, launch, instruction)
    for count, sigma, dtypes in (
        (1, SIGMA, DTYPES[:1]),
        (2, empty(1), DTYPES[:1]),
        (sparse.MAX_COLUMNS, SIGMA, DTYPES),
    ):
        make = partial(launches.sparse_noise, count=count, sigma=sigma)
        yield from per_dtype(f"sparse noise, k = {count}", gemm.product_kernel, make, dtypes)
    for count, title in ((1, "sums of sparse noise"), (2, "sums of sparse noise, k = 2")):
        launch = partial(sparse.column_sums, columns[:, :count], empty(8192, count, 1024), empty(8192), 1024)
        yield Check(f"{title}, bfloat16", sparse.column_sums_kernel, launch, "ld.global.v4")


def sums() -> Iterator[Check]:
    """Weighted sums of outer products, whose operands have sizes outputs, inputs and rows."""
    check = partial(per_dtype, members=1024, inputs=8192)
    updates: Sequence[tuple[str, Sequence[Dtype], dict[str, Any]]] = (
        ("factors", DTYPES, {}),
        ("signs", NORMAL_DTYPES, {"signs": True}),
        ("signs around a core", DTYPES, {"signs": True, "is_cored": True}),
        ("signs around a Hadamard matrix", DTYPES[:1], {"signs": True, "is_hadamard": True}),
    )
    for title, dtypes, options in updates:
        make = partial(launches.outer_products, **options)
        yield from check(f"weighted outer products, {title}", outer.weighted_outer_kernel, make, dtypes)
    yield from check(
        "parts of a sum", outer.add_parts_kernel, launches.outer_products, DTYPES[:1], tile_rows=0
    )


def packed_bits() -> Iterator[Check]:
    """Products of packed bits, members that draw them, and sums."""

    def words(*shape: int) -> Tensor:
        return empty(*shape, dtype=torch.int64)

    matmul = binary_matmul
    for method, kernel, product, instruction, cases in (
        ("by popcount", matmul.bit_product_kernel, matmul.bit_product, "popc.b32", (1, 4)),
        ("as int8", matmul.int8_product_kernel, matmul.int8_product, rf"{WGMMA}\S*\.s8\.s8", (16, 64, 128)),
    ):
        for rows, dtype in (*((rows, torch.int32) for rows in cases), (cases[-1], torch.bfloat16)):
            launch = partial(product, words(1024, rows, 17), words(1024, 17, 1024), 1088, dtype)
            title = f"bits, product of {rows} rows {method}, {str(dtype).removeprefix('torch.')}"
            yield Check(title, kernel, launch, instruction)
    launch = partial(matmul.bit_product, words(1024, 1, 16), words(1024, 16, 1024), 1024, torch.float32)
    yield Check("bits, product of 1 row of 1024, float32", matmul.bit_product_kernel, launch, "popc.b32")
    draw = layer_operands(torch.bfloat16, 1024).draw()
    for title, shape in (("many words", (16, 512)), ("16,384 words", (16, 1024)), ("few words", (1, 32))):
        launch = partial(binary.sample_bits, words(9, *shape), *draw)
        yield Check(f"bits, members drawn, {title}", binary.sample_bits_kernel, launch)
    for dtype, taps in ((torch.float32, ()), (torch.float64, ()), (torch.float32, (3, 3))):
        utilities, p = empty(1024, dtype=dtype), empty(1, 1024, 1024, *taps, dtype=dtype)
        launch = partial(binary.centered_sum, words(1024, 1, *taps, 16, 1024), utilities, p)
        title = (
            f"bits, sum about the mean{', nine taps' if taps else ''}, {str(dtype).removeprefix('torch.')}"
        )
        yield Check(title, binary.centered_sum_kernel, launch)
    launch = partial(binary.bit_planes, empty(1, 1024, 1024, dtype=torch.float32))
    yield Check("bits, planes of probabilities", binary.bit_planes_kernel, launch)


def device_keys() -> Iterator[Check]:
    """The kernel that hashes a step in device memory to Philox keys, and one that reads such keys."""
    step, operands = empty(dtype=torch.int64), layer_operands(torch.bfloat16, 1024)
    yield Check("keys of a step", philox.round_keys_kernel, partial(philox.round_keys, 7, step, 10, (1, 2)))
    draw = operands.draw()._replace(key=empty(10, 2, dtype=torch.int64))
    launch = partial(dense_rng.dense_rng_product, operands.x, operands.weight, draw, SIGMA, operands.y)
    title = "drawn dense normals, 1 row of a member, key in memory, bfloat16"
    yield Check(title, dense_rng.few_rows_kernel, launch)


def checks() -> list[Check]:
    """Return all checks."""
    groups = (dense_noise, low_rank, dropout_masks, shared_cores, sums, packed_bits, device_keys)
    return [check for group in groups for check in group()]


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print registers and memory of each kernel, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m impls.kernels.compile_checks",
        description="Compile every kernel for GPUs that need not be present; check registers and memory.",
    )
    parser.add_argument(
        "--capability", type=int, action="append", help="90 for 9.0; repeatable; by default 80 and 90"
    )
    parser.add_argument("--kernels", default="*", help="glob over the titles of checks, such as 'low rank*'")
    parser.add_argument(
        "--record",
        action="store_true",
        help="compile for 90 only, and renew these kernels in the record instead of comparing",
    )
    parser.add_argument(
        "--candidates",
        action="store_true",
        help="compile the tile sizes that `nox -s tune` tries instead, for 90 only",
    )
    options = parser.parse_args(arguments)
    if not hasattr(triton, "__version__"):
        sys.stderr.write("kernels: triton, which is for Linux only, is not installed here\n")
        return 2
    if options.candidates:
        return compile_candidates(options.kernels)
    return compile_checks(options.kernels, options.capability or CAPABILITIES, renew=options.record)


def compile_checks(kernels: str, capabilities: Sequence[int], *, renew: bool) -> int:
    """Compile the checks whose titles match a glob; compare them with the record, or renew it.

    Returns:
        0; 1 if one fails.
    """
    recorded = None if renew and kernels == "*" else compiled_kernels.read(record.PATH)
    is_same_compiler = recorded is not None and recorded.triton == triton.__version__
    if recorded and not is_same_compiler:
        sys.stderr.write(f"kernels: {other_compiler(recorded)}\n")
    failed, renewed = False, []
    for check in checks():
        if not fnmatchcase(check.title, kernels):
            continue
        for capability in (RECORDED,) if renew else capabilities:
            compiled, problems = try_compiling(check, capability)
            if compiled and renew:
                renewed.append(compiled.kernel)
            elif compiled and recorded and capability == RECORDED:
                problems += compiled.changes(recorded)
            failed |= print_problems(f"{check.title} for {capability}", problems)
    if renew:
        write_record((*(recorded.kernels if recorded and is_same_compiler else ()), *renewed))
    return int(failed)


def compile_candidates(kernels: str) -> int:
    """Compile all candidates of tunable kernels whose tasks match a glob, for the first of their shapes.

    Returns:
        0; 1 if one does not compile, spills, or has more programs than fit on a multiprocessor.
    """
    from impls.kernels import autotune  # noqa: PLC0415  needs triton

    failed, first = False, sorted(autotune.SHAPES[0])
    for task in autotune.TASKS:
        if sorted(task.sizes[:3]) != first or not fnmatchcase(str(task), kernels):
            continue
        tunable = autotune.TUNABLES[task.kernel]
        launch = tunable.launch(task.sizes, BFLOAT16.dtype, META)
        for candidate in tunable.candidates:
            check = Check(f"{task} with {candidate}", tunable.kernel, partial(launch, candidate))
            compiled, problems = try_compiling(check, RECORDED)
            if compiled and candidate.programs > compiled.kernel.fitting_programs:
                problems.append(f"fits {compiled.kernel.fitting_programs} times on a multiprocessor")
            failed |= print_problems(check.title, problems)
    return int(failed)


def try_compiling(check: Check, capability: int) -> tuple[Compiled | None, list[str]]:
    """Compile a kernel and print its figures; return it, if it compiles, and its faults."""
    try:
        compiled = check.compile(capability)
    except Exception as error:  # noqa: BLE001  any error of the compiler or the assembler is the reason
        return None, [f"does not compile: {type(error).__name__}: {error}".splitlines()[0]]
    sys.stdout.write(f"{describe(compiled)}\n")
    return compiled, compiled.problems(check.instruction)


def print_problems(title: str, problems: Sequence[str]) -> bool:
    """Print the faults of a kernel; return whether there are any."""
    for problem in problems:
        sys.stderr.write(f"kernels: {title} {problem}\n")
    return bool(problems)


def describe(compiled: Compiled) -> str:
    """Return the figures of a kernel."""
    kernel = compiled.kernel
    loop = f"{kernel.code.loop_instructions} instructions in the main loop, " if kernel.code.steps else ""
    return (
        f"{kernel.title} for {compiled.capability}: {loop}{kernel.registers} registers, "
        f"{kernel.shared_bytes} bytes of shared memory"
    )


def other_compiler(recorded: Record) -> str:
    """Return why kernels are not compared with the record, which another version of Triton compiled."""
    return (
        f"the record is of triton {recorded.triton}, this is {triton.__version__}: instructions, registers "
        "and shared memory are not compared"
    )


def write_record(kernels: Sequence[CompiledKernel]) -> None:
    """Write the record: the last of the kernels with the same title, if its check exists."""
    titles = {check.title for check in checks()}
    newest = {kernel.title: kernel for kernel in kernels if kernel.title in titles}
    ordered = tuple(newest[title] for title in sorted(newest))
    compiled_kernels.write(Record(triton=triton.__version__, kernels=ordered), record.PATH)


if __name__ == "__main__":
    sys.exit(main())
