"""Product of all members' rows with their shared weight: arguments of a launch, and the loop of a kernel.

Activations are [r, m, p, c] with any strides: repeats, members, positions and channels. They are the rows
(repeat * members + member) * positions + position of one matrix product with a weight [o, c]. A Linear layer
has one position, a 1x1 convolution one for each pixel.

Launchers of fused products take x [r, m, p, i], weight [o, i] and y [r, m, p, o], which they write and
return; sigma, a number or a tensor [r] with a number for each repeat; and tile sizes, by default the tuned
ones or else the default of the kernel. They raise ValueError where shapes or dtypes do not match. Costs in
their docstrings are for R rows with one position each, and e bytes per number.

The ``triton.jit`` functions are inlined in the kernels of the fused schemes. In them ``offs_m``, ``offs_n``
and ``offs_k`` are rows, outputs and channels, and ``mask_m`` and ``mask_n`` are true for rows and outputs
that exist.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impls.kernels.optional_triton import TensorDescriptor, tl, triton
from impls.kernels.tiling import Tiling, find_tuned_tiling, input_precision

DOT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes of a matrix product."""

ALIGNMENT = 16
"""Bytes between possible beginnings of a row that a descriptor takes."""

MAX_PROGRAMS = 2**31 - 1
"""Programs of a launch on axis 0. The other axes have at most 65,535, so kernels use only this one."""


ROW_BYTES = 256
"""Bytes of a row of a tile that are finished and written at once, so that operands fit into memory."""


class Pair(NamedTuple):
    """Sizes of two operands of a product in a kernel: rows and weights, multiplied along their channels.

    Attributes:
        channels: i.
        stride_r: stride of repeats of x, and likewise of members, positions and channels.
        stride_o: stride of the weight's outputs.
    """

    channels: int
    stride_r: int
    stride_m: int
    stride_p: int
    stride_i: int
    stride_o: int


class Output(NamedTuple):
    """Sizes of what a kernel writes.

    Attributes:
        rows: of all members.
        outputs: o.
        members: m.
        positions: p.
        stride_r: stride of repeats of y, and likewise of members, positions and outputs.
        tiles_m: tiles of rows.
        tiles_n: tiles of outputs.
    """

    rows: int
    outputs: int
    members: int
    positions: int
    stride_r: int
    stride_m: int
    stride_p: int
    stride_o: int
    tiles_m: int
    tiles_n: int


class Gemm(NamedTuple):
    """A product of members' rows with a shared weight, and what a kernel adds to it.

    Attributes:
        x: activations [r, m, p, i], any strides.
        weight: [o, i], i contiguous.
        y: the output [r, m, p, o], any strides.
    """

    x: Tensor
    weight: Tensor
    y: Tensor

    @property
    def members(self) -> int:
        """Number of members."""
        return self.x.shape[1]

    @property
    def rows(self) -> int:
        """Rows of all members."""
        return self.x.shape[:3].numel()

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of x, of y, and of the weight's outputs."""
        return *self.x.stride(), *self.y.stride(), self.weight.stride(0)

    @property
    def columns(self) -> int:
        """Largest number of columns of a tile that are finished and written at once."""
        return ROW_BYTES // self.x.itemsize

    def describe_members(
        self, values: Tensor, tiling: Tiling, columns: int | None = None
    ) -> Tensor | TensorDescriptor:
        """Return a descriptor of values [m, ..., c] for :func:`load_of_members`, or the values without one.

        With a descriptor the rows of a tile must be those of consecutive members. By default its tiles are
        those that are finished at once.
        """
        repeats, members, positions, _ = self.x.shape
        is_aligned = values.shape[-1] * values.itemsize % ALIGNMENT == 0
        if positions > 1 or (repeats > 1 and members % tiling.block_m) or not is_aligned:
            return values
        columns = columns or min(self.columns, tiling.block_n)
        return describe(values.flatten(1), tiling.block_m, columns) or values

    def output(self, tiling: Tiling) -> Output:
        """Return the sizes of the output as an argument of a kernel."""
        check_row_count(self.rows, tiling.block_m)
        tiles = -(-self.rows // tiling.block_m), -(-self.weight.shape[0] // tiling.block_n)
        grid_of(*tiles)  # kernels count tiles in int32
        _, members, positions, outputs = self.y.shape
        stride_r, stride_m, stride_p, stride_o = self.y.stride()
        return Output(self.rows, outputs, members, positions, stride_r, stride_m, stride_p, stride_o, *tiles)

    def launch(
        self,
        tiling: Tiling,
        operands: Sequence[Any] = (),
        *more: int | Tensor,
        kernel: Any = None,  # noqa: ANN401  Triton's functions have no type
        stored: Sequence[Tensor | TensorDescriptor | None] = (),
        second: tuple[Tensor, Tensor] | None = None,
        columns: int | None = None,
        reserved: int = 0,
        **constants: Any,  # noqa: ANN401  Triton's functions have no type
    ) -> Tensor:
        """Launch a kernel that loops over tiles, see :func:`product_kernel`, and return y.

        Args:
            tiling: tile sizes.
            operands: of the functions in ``constants``.
            more: arguments of the kernel after its operands.
            stored: at most two further operands of the functions, which may be descriptors.
            kernel: by default :func:`product_kernel`.
            second: rows [r, m, p, k] and a weight [o, k], both with contiguous channels, whose product is a
                part of y.
            columns: largest number of columns of a tile that the last function gets and that are written at
                once: fewer take less memory and registers.
            reserved: see :meth:`Tiling.register_limit`.
            constants: FIRST, INPUT, LAST and OPTIONS of :func:`product_kernel`, and options of a launch.
        """
        if not self.y.numel():
            return self.y
        tiles, dtype = self.output(tiling), self.x.dtype
        columns = min(columns or self.columns, tiling.block_n)
        pairs = [(self.x, self.weight), *([second] if second else [])]
        described = [
            describe(self.y, tiling.block_m, columns),
            *(
                describe(matrix, rows, tiling.block_k)
                for pair in pairs
                for matrix, rows in zip(pair, (tiling.block_m, tiling.block_n), strict=True)
            ),
        ]
        has_descriptors = None not in described
        matrices: Sequence[Any] = described if has_descriptors else [self.y, *itertools.chain(*pairs)]
        sizes = [pair_of(*pair) for pair in pairs]
        missing = [None] * 2
        constants = {"OPTIONS": (), "FLATTEN": second is None, **constants}
        constants["FLATTEN"] &= not is_before_hopper(self.x.device)  # there it takes too many registers
        if kernel is None:
            kernel, constants = product_kernel, {"FIRST": None, "INPUT": None, "LAST": None, **constants}
        with torch.cuda.device_of(self.x):
            kernel[programs_of(tiles.tiles_m * tiles.tiles_n, tiling.programs, self.x.device)](
                *(*matrices, *missing)[:5], *(*stored, *missing)[:2],
                tiles, sizes[0], sizes[1] if second else None, tuple(operands), *more,
                DESCRIPTORS=has_descriptors, COLUMNS=columns, ACC=accumulator_dtype(dtype),
                PRECISION=input_precision(dtype), **constants,
                **{**tiling.options, **tiling.register_limit(reserved)},
            )  # fmt: skip
        return self.y


EARLY_CAPABILITY = (9, 0)
"""Compute capability from which kernels may overlap."""


def describe(values: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """Return a descriptor of a matrix [..., c], for loads and stores of tiles; None if it has none.

    Tiles are then copied to and from shared memory by one instruction of capability 9.0. It takes contiguous
    channels and rows that begin at multiples of 16 bytes, one after another: not those of an expanded tensor.
    """
    if is_before_hopper(values.device):
        return None
    try:
        matrix = values.view(-1, values.shape[-1])
    except RuntimeError:  # rows have no common stride
        return None
    stride, channel_stride = matrix.stride()
    is_aligned = matrix.data_ptr() % ALIGNMENT == 0 == stride * values.itemsize % ALIGNMENT
    is_apart = channel_stride == 1 and stride >= matrix.shape[1]
    if not is_apart or not is_aligned or values.dtype is torch.float64 or len(matrix) > MAX_PROGRAMS:
        return None
    return TensorDescriptor(matrix, list(matrix.shape), [stride, 1], [rows, columns])


def empty_aligned(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialized tensor [..., c] with rows that begin at multiples of 16 bytes."""
    *outer, width = shape
    at_once = ALIGNMENT // like.itemsize
    padded = torch.empty(*outer, -(-width // at_once) * at_once, device=like.device, dtype=like.dtype)
    return padded[..., :width]


def pair_of(rows: Tensor, weight: Tensor) -> Pair:
    """Return the sizes of rows [r, m, p, i] and a weight [o, i] as an argument of a kernel."""
    stride_r, stride_m, stride_p, stride_i = rows.stride()
    return Pair(weight.shape[1], stride_r, stride_m, stride_p, stride_i, weight.stride(0))


def can_begin_early(device: torch.device) -> bool:
    """Return whether a kernel may begin before the one that it waits for ends: from capability 9.0 on."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY
    # Tensors without data are compiled for the capability that Triton is told.
    return device.type == "meta" and triton.runtime.driver.active.get_current_target().arch >= 90  # noqa: PLR2004  9.0


def is_before_hopper(device: torch.device) -> bool:
    """Return whether kernels run on, or are compiled for, a GPU before capability 9.0."""
    return device.type != "cpu" and not can_begin_early(device)


INTERPRETED_PROCESSORS = 2
"""Multiprocessors without a GPU: few, so that the interpreter's programs compute several tiles, too."""


def programs_of(tiles: int, programs: int, device: torch.device) -> tuple[int]:
    """Return the grid of a kernel whose programs compute tiles one after another.

    Several programs on each multiprocessor, see :attr:`Tiling.programs`, hide how each one ends its tiles.
    """
    multiprocessors = INTERPRETED_PROCESSORS
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return (min(tiles, multiprocessors * programs),)


def programs_before_product(tiles: int, programs: int, device: torch.device) -> tuple[int]:
    """Return the grid of a kernel that loops over tiles and prepares operands for a product.

    Where the product's kernel may begin early, these are so few programs that it runs beside all of them.
    Elsewhere each tile has one.
    """
    grid = grid_of(tiles)
    return grid if is_before_hopper(device) else programs_of(tiles, programs, device)


def gemm_of(x: Tensor, weight: Tensor, y: Tensor) -> Gemm:
    """Check x [r, m, p, i], weight [o, i] and y [r, m, p, o], all of one dtype on one device.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    matches = x.shape[:3] == y.shape[:3] and (*weight.shape,) == (y.shape[-1], x.shape[-1])
    if not matches or not x.dtype == weight.dtype == y.dtype or x.dtype not in DOT_DTYPES:
        got = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (x, weight, y))
        raise ValueError(
            "a product takes x [r, m, p, i], weight [o, i] and y [r, m, p, o] of the same floating dtype, "
            f"got {', '.join(got)}"
        )
    return Gemm(x, weight if weight.stride(1) == 1 else weight.contiguous(), y)


def select_tiling(kernel: str, gemm: Gemm, requested: Tiling | None, default: Tiling, *more: int) -> Tiling:
    """Return the tile sizes of a launch: the requested, else the tuned, else the default ones.

    Args:
        kernel: its name in tables of tuned tile sizes.
        gemm: the product.
        requested: tile sizes that the caller asks for; None for the tuned ones.
        default: for a 16-bit dtype, see :meth:`Tiling.for_dtype`.
        more: sizes besides rows, outputs and inputs that tile sizes depend on.

    Raises:
        UserError: the table of this GPU cannot be read; the message names the file.
    """
    sizes = gemm.rows, *gemm.weight.shape
    if is_before_hopper(gemm.x.device):
        columns = min(default.block_n, 128)
        default = default._replace(block_n=columns, num_warps=max(default.num_warps, 8), programs=1)
    tiling = requested or find_tuned_tiling(kernel, gemm.x, *sizes, *more) or default.for_dtype(gemm.x.dtype)
    return tiling.clip(*sizes)


def noise_scale(sigma: float | Tensor, x: Tensor, factor: float = 1.0) -> tuple[Tensor | None, float]:
    """Multiply sigma, a number or a tensor of one value for each repeat of x [r, ...], by a factor.

    Returns:
        The arguments ``sigmas`` [r] and ``sigma`` of a kernel, which reads the number if ``sigmas`` is None.
    """
    if isinstance(sigma, Tensor):
        return sigma.flatten() * factor, 0.0
    if x.dtype is torch.float64:  # a number that is passed to a kernel is float32
        return x.new_full((len(x),), sigma * factor), 0.0
    return None, sigma * factor


def accumulator_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the Triton dtype in which products of this dtype are summed."""
    return tl.float64 if dtype is torch.float64 else tl.float32


def check_row_count(rows: int, block_m: int) -> None:
    """Check that a kernel can count this many rows in int32, rounded up to whole tiles of ``block_m``.

    Raises:
        ValueError: there are too many rows.
    """
    most = MAX_PROGRAMS // block_m * block_m
    if rows > most:
        raise ValueError(
            f"a kernel takes at most {most} rows (repeats x members x positions), got {rows}: split the "
            "batch, or evaluate fewer members at once"
        )


def grid_of(*counts: int) -> tuple[int]:
    """Return a one-dimensional grid of the product of these numbers of programs.

    Raises:
        ValueError: a launch cannot have this many programs.
    """
    grid = 1
    for count in counts:
        grid *= count
    if grid > MAX_PROGRAMS:
        raise ValueError(
            f"a launch of {grid} programs exceeds the limit of {MAX_PROGRAMS}: split the batch, or evaluate "
            "fewer members at once"
        )
    return (grid,)


def operand(
    name: str, values: Tensor, shape: Sequence[int], dtype: torch.dtype, *, may_be_apart: bool = False
) -> Tensor:
    """Check the shape and dtype of an operand, and return it contiguous.

    With ``may_be_apart`` only its last axis is contiguous.

    Raises:
        ValueError: the shape or the dtype differs.
    """
    if values.shape != tuple(shape) or values.dtype is not dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {values.dtype} {list(values.shape)}")
    return values if may_be_apart and values.stride(-1) == 1 else values.contiguous()


@triton.jit
def tile_index(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return the row and column of tile ``pid``: down GROUP_M tiles, then the next column."""
    first_m = pid // (GROUP_M * tiles_n) * GROUP_M
    group_m = min(tiles_m - first_m, GROUP_M)
    pid_in_group = pid % (GROUP_M * tiles_n)
    return first_m + pid_in_group % group_m, pid_in_group // group_m


@triton.jit
def row_to_member(offs_m, members, positions):
    """Return (repeat, member, position) of rows, int64; they are counted in this order, positions fastest."""
    image = offs_m // positions
    return (image // members).to(tl.int64), (image % members).to(tl.int64), (offs_m % positions).to(tl.int64)


@triton.jit
def load_sigma(sigmas, sigma, repeat, mask_m, ACC: tl.constexpr):
    """Return each row's noise scale in dtype ACC: ``sigmas[repeat]``, or ``sigma`` without ``sigmas``."""
    if sigmas is None:
        return tl.full(repeat.shape, sigma, ACC)
    else:  # noqa: RET505  the compiler takes no early return here
        return tl.load(sigmas + repeat, mask=mask_m, other=0).to(ACC)


@triton.jit
def load_x(x, stride_xi, mask_m, offs_k, inputs):
    """Load channels of rows, [m, k]; ``x`` points to each row's first channel."""
    mask = mask_m[:, None] & (offs_k < inputs)[None, :]
    # Channels may lie so far apart that their offsets need 64 bits.
    return tl.load(x[:, None] + offs_k[None, :].to(tl.int64) * stride_xi, mask=mask, other=0)


@triton.jit
def load_weight(weight, stride_wo, offs_n, mask_n, offs_k, inputs):
    """Load channels of a weight's outputs, transposed: [k, n]."""
    mask = (offs_k < inputs)[:, None] & mask_n[None, :]
    return tl.load(weight + offs_n.to(tl.int64)[None, :] * stride_wo + offs_k[:, None], mask=mask, other=0)


@triton.jit
def flip_signs(values, signs):
    """Multiply values by the signs of integers, by an exclusive or of the sign bits: exact in any dtype."""
    bits: tl.constexpr = values.dtype.primitive_bitwidth
    int_dtype: tl.constexpr = tl.core.get_int_dtype(bits, True)  # noqa: FBT003  the compiler's own function
    sign_bit = signs.to(int_dtype) & -(1 << (bits - 1))
    return (values.to(int_dtype, bitcast=True) ^ sign_bit).to(values.dtype, bitcast=True)


@triton.jit
def load_operands(
    x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, offs_k, inputs,
):  # fmt: skip
    """Load channels ``offs_k`` of rows, [m, k], and of outputs, [k, n]; those from ``inputs`` on are zeros.

    Args:
        x: pointers to each row's first channel, [m].
        stride_xi: stride of x's channels.
        mask_m: whether a row exists, [m].
        weight: pointer to [o, i], i contiguous.
        stride_wo: stride of the weight's outputs.
        offs_n: outputs, [n].
        mask_n: whether an output exists, [n].
        offs_k: channels, [k].
        inputs: number of channels.
    """
    a = load_x(x, stride_xi, mask_m, offs_k, inputs)
    return a, load_weight(weight, stride_wo, offs_n, mask_n, offs_k, inputs)


@triton.jit
def gemm_loop(
    acc, x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, begin, end,
    ACC: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the product over channels ``begin`` to ``end`` to ``acc``, see :func:`load_operands`."""
    for start in range(begin, end, BLOCK_K):
        a, b = load_operands(
            x, stride_xi, mask_m, weight, stride_wo, offs_n, mask_n, start + tl.arange(0, BLOCK_K), end
        )
        acc = tl.dot(a, b, acc=acc, out_dtype=ACC, input_precision=PRECISION)
    return acc


@triton.jit
def load_of_members(values, out, start_m, start, end, width, like, IS_DESCRIBED: tl.constexpr):
    """Load each row's part of ``values`` [members, width], from column ``start`` on: a tile like ``like``.

    Columns from ``end`` on, and rows that do not exist, have any value. With IS_DESCRIBED ``values`` is a
    descriptor, see :meth:`Gemm.describe_members`, otherwise a pointer.
    """
    if IS_DESCRIBED:
        return values.load([start_m % out.members, start])
    else:  # noqa: RET505  the compiler takes no early return here
        offs_m, offs_n = start_m + tl.arange(0, like.shape[0]), start + tl.arange(0, like.shape[1])
        _, member, _ = row_to_member(offs_m, out.members, out.positions)
        return load_x(values + member * width, 1, offs_m < out.rows, offs_n, end)


@triton.jit
def scale_rows(
    acc, out, stored, operands, start_m, start_n, OPTIONS: tl.constexpr, ACC: tl.constexpr  # noqa: ARG001  as every FIRST
):  # fmt: skip
    """Multiply rows of acc [m, n] by the noise scale of their repeat, the two ``operands``."""
    offs_m = start_m + tl.arange(0, acc.shape[0])
    repeat, _, _ = row_to_member(offs_m, out.members, out.positions)
    return acc * load_sigma(operands[0], operands[1], repeat, offs_m < out.rows, ACC)[:, None]


@triton.jit
def multiply(
    acc, x, weight, pair, out, stored, operands, start_m, start_n, INPUT: tl.constexpr, OPTIONS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add a tile's product of a pair to ``acc`` [m, n].

    INPUT, if it is not None, is a function that changes a tile of rows before it is multiplied: it takes the
    tile [m, k], ``out``, ``stored``, ``operands``, its first row and channel, the number of channels, OPTIONS
    and ACC.
    """
    offs_m, offs_n = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
    repeat, member, position = row_to_member(offs_m, out.members, out.positions)
    for start in range(0, pair.channels, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        if DESCRIPTORS:
            a = x.load([start_m, start])
            b = weight.load([start_n, start]).T
        else:
            x_rows = x + repeat * pair.stride_r + member * pair.stride_m + position * pair.stride_p
            a, b = load_operands(
                x_rows, pair.stride_i, offs_m < out.rows, weight, pair.stride_o,
                offs_n, offs_n < out.outputs, offs_k, pair.channels,
            )  # fmt: skip
        if INPUT is not None:
            a = INPUT(a, out, stored, operands, start_m, start, pair.channels, OPTIONS, ACC)
        acc = tl.dot(a, b, acc=acc, out_dtype=ACC, input_precision=PRECISION)
    return acc


@triton.jit
def split_columns(values, PARTS: tl.constexpr):
    """Split a tile [m, n] into a tuple of PARTS tiles of neighboring columns."""
    if PARTS == 1:
        return (values,)
    else:  # noqa: RET505  the compiler takes no early return here
        left, right = values.reshape(values.shape[0], 2, values.shape[1] // 2).permute(0, 2, 1).split()
        return split_columns(left, PARTS // 2) + split_columns(right, PARTS // 2)


@triton.jit
def store_tile(acc, y, out, start_m, start_n, DESCRIPTORS: tl.constexpr):
    """Write ``acc`` [m, n] to y."""
    offs_m, offs_n = start_m + tl.arange(0, acc.shape[0]), start_n + tl.arange(0, acc.shape[1])
    if DESCRIPTORS:
        y.store([start_m, start_n], acc.to(y.dtype))
    else:
        repeat, member, position = row_to_member(offs_m, out.members, out.positions)
        y += repeat * out.stride_r + member * out.stride_m + position * out.stride_p
        mask = (offs_m < out.rows)[:, None] & (offs_n < out.outputs)[None, :]
        y = y[:, None] + offs_n.to(tl.int64)[None, :] * out.stride_o
        tl.store(y, acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def product_kernel(
    y, x, weight, second_x, second_weight, stored, more_stored, out, pair, second, operands,
    FIRST: tl.constexpr, INPUT: tl.constexpr, LAST: tl.constexpr, OPTIONS: tl.constexpr,
    DESCRIPTORS: tl.constexpr, COLUMNS: tl.constexpr, FLATTEN: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the shared weight, tile after tile, with what three functions do to a tile.

    With FLATTEN the loops over tiles and over channels are compiled to one loop: while a tile is finished and
    written, the first operands of the next one are being loaded.

    Args:
        y: descriptor of [rows, o], or a pointer to y [r, m, p, o]. Descriptors are arguments of their own, as
            Triton cannot launch a kernel with one in a tuple.
        x: descriptor of [rows, i], or a pointer to x [r, m, p, i].
        weight: the shared weight: descriptor of [o, i], or a pointer to it; i is contiguous.
        second_x: None, or further rows, whose product with ``second_weight`` is added first, before FIRST.
        second_weight: None, or their weight.
        stored: None, or what the functions load: a descriptor or a pointer.
        more_stored: likewise.
        out: sizes of y.
        pair: sizes of x and the weight.
        second: None, or sizes of further rows and their weight.
        operands: a tuple of other operands of the functions.
        FIRST: None, or a function that changes the product of ``second``: takes acc [m, n], ``out``, a
            tuple of both ``stored``, ``operands``, the tile's first row and output, OPTIONS and ACC, and
            returns acc.
        INPUT: None, or a function that changes tiles of rows, of ``second_x`` if there is one, see
            :func:`multiply`.
        LAST: None, or a function like FIRST for COLUMNS columns of the complete sum.
        OPTIONS: a tuple of numbers for the functions.
        DESCRIPTORS: whether y, rows and weights are descriptors.
        COLUMNS: number of columns that are finished and written at once.
        FLATTEN: whether to make one loop; functions then have no loops of their own.
        ACC: dtype of sums.
        PRECISION: of float32 products.
        GROUP_M: tiles of rows that share a tile of columns, for the cache.
        BLOCK_M: rows of a tile.
        BLOCK_N: outputs of a tile.
        BLOCK_K: channels that are multiplied at once.
    """
    stored = (stored, more_stored)
    for pid in tl.range(tl.program_id(0), out.tiles_m * out.tiles_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_index(pid, out.tiles_m, out.tiles_n, GROUP_M)
        start_m, start_n = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC)
        if second is not None:
            acc = multiply(
                acc, second_x, second_weight, second, out, stored, operands, start_m, start_n,
                INPUT, OPTIONS, DESCRIPTORS, ACC, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = FIRST(acc, out, stored, operands, start_m, start_n, OPTIONS, ACC)
        acc = multiply(
            acc, x, weight, pair, out, stored, operands, start_m, start_n,
            INPUT if second is None else None, OPTIONS, DESCRIPTORS, ACC, PRECISION,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        parts = split_columns(acc, BLOCK_N // COLUMNS)
        for index in tl.static_range(BLOCK_N // COLUMNS):
            part, first_n = parts[index], start_n + index * COLUMNS
            if LAST is not None:
                part = LAST(part, out, stored, operands, start_m, first_n, OPTIONS, ACC)
            store_tile(part, y, out, start_m, first_n, DESCRIPTORS)
