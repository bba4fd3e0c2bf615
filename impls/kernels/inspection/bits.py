"""Launches of the kernels of bits that are worth a look: products, members that are drawn, sums."""

from collections.abc import Mapping
from typing import Any

from impls.kernels import bits, matrices, planes, sampling, sums
from impls.kernels.inspection.specimen import MATRIX, Specimen

WARPS = 4
"""Of a program, unless its kernel asks for others."""

POPCOUNT = {80: ("popc.b32",), 90: ("popc.b32",)}
POINTERS = {"out": "*i32", "x": "*i32", "weights": "*i32", "words": "*i32", "planes": "*i32"}
STRIDES = {"x_stride": "i64", "weight_stride": "i64"}


def specimen(
    kernel: Any,  # noqa: ANN401  as triton decorates it
    title: str,
    constants: Mapping[str, object],
    instructions: Mapping[int, tuple[str, ...]],
    warps: int = WARPS,
    **types: str,
) -> Specimen:
    """Describe a launch whose pointers, strides and widths are multiples of 16; its counts need not be."""
    known = {**POINTERS, **STRIDES, "thresholds": "*fp32", **types}
    names = [name for name in kernel.arg_names if name not in constants]
    return Specimen(
        kernel=kernel,
        title=title,
        types={name: known[name] for name in names if name in known},
        constants=constants,
        instructions=instructions,
        warps=warps,
        odd=[name for name in names if name not in known and not name.endswith(("stride", "width"))],
    )


def product(rows: int, group: int) -> dict[str, object]:
    """Return what a launch of a product with many columns compiles in: with one row, also that p is 1."""
    tile = {"GROUP": group, "ROWS": rows, "DEEP": bits.DEEP, "COLUMNS": bits.MOST_COLUMNS}
    return {**tile, "p": 1} if rows == 1 else {**tile}


PRODUCTS = tuple(
    specimen(kernel, f"{title}, words of {32 * group} bits", product(rows, group), POPCOUNT)
    for kernel, rows, title in (
        (bits.bit_product_kernel, 1, "bits, product of one row"),
        (bits.bit_product_kernel, 4, "bits, product of 4 rows"),
        (bits.bit_product_threshold_kernel, 1, "bits, product of one row and threshold"),
    )
    for group in (1, 2)
)
"""Products on the popcount of few rows."""

SCALED = (
    specimen(
        bits.bit_product_kernel,
        "bits, product of one row in bfloat16, words of 64 bits",
        product(1, 2),
        POPCOUNT,
        out="*bf16",
    ),
    specimen(
        matrices.int8_product_kernel,
        f"bits, product of {matrices.MOST_ROWS} rows as int8 in bfloat16, words of 64 bits",
        {
            "GROUP": 2,
            "ROWS": matrices.MOST_ROWS,
            "DEEP": matrices.shape(matrices.MOST_ROWS)[0],
            "COLUMNS": matrices.MOST_COLUMNS,
        },
        MATRIX,
        matrices.shape(matrices.MOST_ROWS)[1],
        out="*bf16",
    ),
)
"""Products of unit size."""

MATRICES = tuple(
    specimen(
        matrices.int8_product_kernel,
        f"bits, product of {rows} rows as int8, words of {32 * group} bits",
        {"GROUP": group, "ROWS": rows, "DEEP": matrices.shape(rows)[0], "COLUMNS": matrices.MOST_COLUMNS},
        MATRIX,
        matrices.shape(rows)[1],
    )
    for rows, group in ((matrices.LEAST_ROWS, 2), (64, 1), (64, 2), (matrices.MOST_ROWS, 2))
)
"""Products on matrix units of many rows."""

PLAIN: dict[str, object] = {"CENTRED": False, "taps": 1, "out_column": 1}
LINEAR: dict[str, object] = {"CENTRED": True, "taps": 1, "out_tap": 1, "out_bit": 1}
"""Where sums lie: along outputs, or as the weight of a layer without taps."""

SAMPLING = tuple(
    specimen(
        sampling.sample_bits_kernel,
        f"bits, members drawn, {title}",
        {"WHOLE": whole, "OWN": sampling.OWN_MEMBERS, "AT_ONCE": at_once, "CALLS": calls},
        {80: (), 90: ()},
    )
    for title, whole, at_once, calls in (
        ("whole calls of Philox", True, 1, sampling.MOST_CALLS),
        ("parts of calls of Philox", False, 1, sampling.MOST_CALLS),
        ("eight of few words at once", True, 8, 16),
    )
)

SUMS = tuple(
    specimen(
        sums.weighted_sum_kernel,
        f"bits, {title} in {name}, words of {32 * group} bits",
        {"GROUP": group, "AT_ONCE": sums.AT_ONCE, "COLUMNS": sums.MOST_COLUMNS, **layout},
        {80: (), 90: ()},
        out=kind,
        weights=kind,
        centre=kind,
        out_part="i64",
        out_lead="i64",
        out_column="i64",
    )
    for title, layout, name, kind, group in (
        ("weighted sum", PLAIN, "float32", "*fp32", 1),
        ("weighted sum", PLAIN, "float32", "*fp32", 2),
        ("sum about the mean", LINEAR, "float32", "*fp32", 2),
        ("sum about the mean", LINEAR, "float64", "*fp64", 2),
        (
            "sum about the mean of nine taps",
            {"CENTRED": True, "taps": 9, "out_tap": 1, "out_bit": 9},
            "float32",
            "*fp32",
            2,
        ),
    )
)

PLANES = tuple(
    specimen(
        planes.bit_planes_kernel,
        f"bits, planes of probabilities, words of {32 * group} bits",
        {"PLANES": planes.PLANES, "GROUP": group, "COLUMNS": planes.MOST_COLUMNS, "taps": 1},
        {80: (), 90: ()},
        p="*fp32",
    )
    for group in (1, 2)
)

SPECIMENS = (*PRODUCTS, *SCALED, *MATRICES, *SAMPLING, *SUMS, *PLANES)
