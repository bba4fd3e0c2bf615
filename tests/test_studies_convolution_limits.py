"""Floors of convolutions with noise."""

from pathlib import Path

import pytest

from esbench import compiled
from esbench.compiled import Record
from esbench.studies.convolution_limits import SHAPES, Convolution, convolution_table, schemes
from impls.benchmark.suites import NESGPU_CONV2D

RECORD = compiled.read(Path(__file__).parents[1] / compiled.FILE)


def test_shapes_are_those_of_the_suites() -> None:
    """The table has the convolutions that suite ``readme`` measures, and a row for each."""
    assert SHAPES == NESGPU_CONV2D
    text = convolution_table(RECORD)
    assert len(text.splitlines()) == 2 + len(SHAPES)
    assert text.count("has one") == sum(kernel == (1, 1) for _, _, kernel, _ in SHAPES)
    with pytest.raises(LookupError, match="no 'two products"):
        convolution_table(Record(triton="3", kernels=()))


def test_floors_are_those_of_the_slowest_part() -> None:
    """A convolution of few channels is bound by its bytes; the kernel by the cache, or by instructions."""
    small, large = (Convolution.of(*SHAPES[index]) for index in (0, 2))
    images = 2 * 1024 * 16 * (64 * 64 + 62 * 62)
    assert small.product_ns() == pytest.approx(images / 4800, rel=1e-4)
    assert large.product_ns() == pytest.approx(2 * 1024 * 900 * 64 * 64 * 9 / 989e3)
    assert small.written_out_ns == pytest.approx((images + 2 * 1024 * 2 * 16 * 16 * 9) / 4800, rel=1e-4)
    # 16 tiles of 256 pixels for each member, 8 warps, four schedulers, 132 multiprocessors.
    issued = 1024 * 16 * 8 * (9 * 100 + 300) / (132 * 4 * 1.755)
    assert small.kernel_ns(0, 100) == pytest.approx(issued)
    cached = 9 * large.x + 1024 * 4 * large.weight
    assert large.kernel_ns(0, 10) == pytest.approx(cached / (64 * 132 * 1.755))
    assert small.kernel_ns(10**9, 10) == pytest.approx((images + 10**9) / 4800, rel=1e-4)
    # Torch reads the input of low-rank noise again, and reads and writes the output.
    passes = schemes(small)["low rank"].passes
    assert passes == pytest.approx(small.x + 2 * small.y, rel=0.05)
