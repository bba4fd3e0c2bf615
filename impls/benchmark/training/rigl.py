"""The suite of RigL: topology updates, training steps, and how well sparse networks read."""

import impls.benchmark.training.sparse_training  # noqa: F401  # imported for what it registers
from esbench.registry import Suite, suite
from esbench.schema import QUALITY, Case
from impls.benchmark.training import sparse_digits, subjects, topology_update

MLP, CNN = subjects.OPERATORS

SIZES = (256, 512, 1024, 2048, 4096)
"""Of square weights whose connections are updated."""


def update(out: int, inp: int, kernel_size: tuple[int, ...] = (), dtype: str = "float32") -> Case:
    """Make a case of a topology update."""
    (operator,) = topology_update.OPERATORS
    return Case(
        operator=operator,
        out_channels=out,
        in_channels=inp,
        kernel_size=kernel_size,
        members=1,
        dtype=dtype,
    )


def mlp(width: int, rows: int, dtype: str = "float32") -> Case:
    """Make a case of an MLP."""
    return Case(operator=MLP, out_channels=width, in_channels=width, members=1, repeats=rows, dtype=dtype)


def cnn(width: int, side: int, rows: int, dtype: str = "float32") -> Case:
    """Make a case of a CNN that reads images of three colours."""
    return Case(
        operator=CNN,
        out_channels=width,
        in_channels=3,
        kernel_size=(3, 3),
        input_size=(side, side),
        members=1,
        repeats=rows,
        dtype=dtype,
    )


(DIGITS,) = (
    Case(operator=operator, out_channels=10, in_channels=64, members=1)
    for operator in sparse_digits.OPERATORS
)

CHECKS = (
    update(9, 8, dtype="float64"),
    update(4, 3, (3, 3), dtype="float64"),
    mlp(64, 8, dtype="float64"),
    cnn(6, 8, 4, dtype="float64"),
)
"""For the suite ``check``."""

VARIANTS = (
    *("MaskMultiply", "FullSort", "PartialSelection*"),
    *("DenseTraining", "RigLTorch", "RigL", "RigL(*", "Static", "Csr*", "Condensed*", "Blocks*"),
    *("SemiStructured", "DenseDigits", "Trained(*"),
)

suite(
    Suite(
        name="rigl",
        description="sparse training: topology updates, steps of an MLP and a CNN, accuracy on digits",
        cases=(
            *(update(size, size) for size in SIZES),
            update(64, 64, (3, 3)),
            mlp(1024, 128),
            cnn(64, 16, 32),
            DIGITS,
        ),
        variants=VARIANTS,
        phases=("update", "step", QUALITY),
        cell_s=1.0,
        active=(),
    )
)
