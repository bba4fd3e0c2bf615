"""What the kernels of bits compile to, beyond what all kernels are held to: see test_inspection.py."""

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels import bits
from impls.kernels.inspection.bits import MATRICES, PRODUCTS, SAMPLING, SUMS, WARPS
from impls.kernels.inspection.specimen import MATRIX, Inspection, Specimen, inspect
from tests.kernels import one_per_kernel

CAPABILITIES = (90,)
THREADS = 32 * WARPS

FEWEST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on any GPU from 8.0 on."""

SWAR = (0x55555555, 0x33333333, 0x0F0F0F0F, 0x01010101)
"""Constants that a popcount has as long as the compiler does not know it for one."""

every_capability = pytest.mark.parametrize("capability", CAPABILITIES)


pytestmark = pytest.mark.usefixtures("compiled_once")


def held(specimen: Specimen, capability: int) -> Inspection:
    """Compile a kernel, and hold it to two programs at least for each processor of any GPU."""
    found = inspect(specimen, capability)
    assert found.spilled_bytes == 0
    assert found.registers <= 255
    assert found.shared_bytes <= FEWEST_SHARED
    return found


def titled(*specimens: Specimen) -> pytest.MarkDecorator:
    """Each of the specimens, by its title."""
    return pytest.mark.parametrize("specimen", specimens, ids=lambda specimen: specimen.title)


@every_capability
@titled(*one_per_kernel(PRODUCTS))
def test_a_word_is_one_popcount(specimen: Specimen, capability: int) -> None:
    """The loop has one popc.b32 for each word and row of a thread's part of a tile, and no step by hand."""
    found, rows = held(specimen, capability), specimen.constants["ROWS"]
    assert isinstance(rows, int)
    assert found.count("popc.b32") == rows * bits.DEEP * bits.MOST_COLUMNS // THREADS
    assert not any(str(constant) in found.ptx for constant in SWAR)


@titled(PRODUCTS[0])
def test_weights_are_read_once_in_wide_loads(specimen: Specimen) -> None:
    """A thread reads its words of a weight 16 bytes at a time, and each of them once."""
    wide = inspect(specimen, 90).ptx.count("ld.global.v4.b32")
    assert wide == bits.DEEP * bits.MOST_COLUMNS // THREADS // 4


@every_capability
@titled(*one_per_kernel(MATRICES))
def test_more_rows_use_matrix_units(specimen: Specimen, capability: int) -> None:
    """A product of many rows is made of int8 matrix instructions, and four bits are unpacked at a time."""
    found = held(specimen, capability)
    assert found.count("st.shared.b8") == found.count("prmt") == 0
    lines = [line for line in found.ptx.splitlines() if MATRIX[capability][0] in line]
    assert lines
    assert all(".s8.s8" in line for line in lines)


@every_capability
@titled(*one_per_kernel(SAMPLING))
def test_sampling_fits_in_registers(specimen: Specimen, capability: int) -> None:
    """Nine planes of four words stay in registers while members are drawn."""
    held(specimen, capability)


@every_capability
@titled(*one_per_kernel(SUMS))
def test_sums_fit_in_registers(specimen: Specimen, capability: int) -> None:
    """A thread's sums stay in registers, and nothing is added to memory atomically."""
    found = held(specimen, capability)
    assert "atom" not in found.ptx
    assert ".red." not in found.ptx
