"""What kernels compile to, for GPUs that need not be there: the instructions that count, and no spills."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels import bits, matrices, sampling, sums
from tests.kernels.compiled import WARPS, Compiled, compiled

CAPABILITIES = (80, 90)
THREADS = 32 * WARPS

FEWEST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on any GPU from 8.0 on."""

SWAR = (0x55555555, 0x33333333, 0x0F0F0F0F, 0x01010101)
"""Constants that a popcount has as long as the compiler does not know it for one."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile anew, and leave nothing in a person's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def product(rows: int, group: int) -> dict[str, object]:
    """Return what a launch of a product with many columns compiles in: with one row, also that p is 1."""
    constants: dict[str, object] = {
        "GROUP": group,
        "ROWS": rows,
        "DEEP": bits.DEEP,
        "COLUMNS": bits.MOST_COLUMNS,
    }
    return constants | ({"p": 1} if rows == 1 else {})


def holds(kernel: Compiled) -> None:
    """Hold a kernel to what a GPU has: nothing spilled, and two programs at least for each processor."""
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= 255
    assert kernel.shared_bytes <= FEWEST_SHARED


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(
    ("kernel", "rows"),
    [(bits.bit_product_kernel, 1), (bits.bit_product_kernel, 4), (bits.bit_product_threshold_kernel, 1)],
    ids=["product-1", "product-4", "threshold-1"],
)
def test_a_word_is_one_popcount(kernel: Any, rows: int, group: int, capability: int, tmp_path: Path) -> None:
    """The loop has one popc.b32 for each word and row of a thread's part of a tile, and no step by hand."""
    found = compiled(kernel, capability, product(rows, group), tmp_path)
    holds(found)
    assert found.count("popc.b32") == rows * bits.DEEP * bits.MOST_COLUMNS // THREADS
    assert not any(str(constant) in found.ptx for constant in SWAR)


@pytest.mark.parametrize("group", [1, 2])
def test_weights_are_read_once_in_wide_loads(group: int, tmp_path: Path) -> None:
    """A thread reads its words of a weight 16 bytes at a time, and each of them once."""
    found = compiled(bits.bit_product_kernel, 90, product(1, group), tmp_path)
    wide = found.ptx.count("ld.global.v4.b32")
    assert wide == bits.DEEP * bits.MOST_COLUMNS // THREADS // 4


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("rows", "group"), [(matrices.LEAST_ROWS, 2), (64, 1), (64, 2), (matrices.MOST_ROWS, 2)]
)
def test_more_rows_use_matrix_units(rows: int, group: int, capability: int, tmp_path: Path) -> None:
    """A product of many rows is made of int8 matrix instructions, and four bits are unpacked at a time."""
    deep, warps = matrices.shape(rows)
    constants = {"GROUP": group, "ROWS": rows, "DEEP": deep, "COLUMNS": matrices.MOST_COLUMNS}
    found = compiled(matrices.int8_product_kernel, capability, constants, tmp_path, warps)
    holds(found)
    assert found.count("st.shared.b8") == found.count("prmt") == 0
    instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
    lines = [line for line in found.ptx.splitlines() if instruction in line]
    assert lines
    assert all(".s8.s8" in line for line in lines)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("whole", [True, False])
def test_sampling_fits_in_registers(whole: bool, capability: int, tmp_path: Path) -> None:
    """Nine planes of four words stay in registers while members are drawn."""
    constants = {"WHOLE": whole, "OWN": sampling.OWN_MEMBERS, "CALLS": sampling.MOST_CALLS}
    holds(compiled(sampling.sample_bits_kernel, capability, constants, tmp_path))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("group", [1, 2])
def test_sums_fit_in_registers(group: int, capability: int, tmp_path: Path) -> None:
    """A thread's sums stay in registers, and nothing is added to memory atomically."""
    constants = {"GROUP": group, "AT_ONCE": sums.AT_ONCE, "COLUMNS": sums.MOST_COLUMNS}
    found = compiled(sums.weighted_sum_kernel, capability, constants, tmp_path, out="*fp32", weights="*fp32")
    holds(found)
    assert "atom" not in found.ptx
    assert ".red." not in found.ptx
