"""What fused kernels compile to: the instructions that count, no spills, and room for them on a GPU."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels.inspection import SPECIMENS
from impls.kernels.inspection.specimen import MOST_REGISTERS, MOST_SHARED_BYTES, Specimen, inspect


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile anew, and leave nothing in a person's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("capability", sorted(MOST_SHARED_BYTES))
@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda specimen: specimen.title)
def test_a_kernel_compiles_to_what_counts(specimen: Specimen, capability: int) -> None:
    """It has the instructions that make it fast, spills nothing, and fits a GPU that need not be here."""
    found = inspect(specimen, capability)
    for instruction in specimen.instructions[capability]:
        assert found.count(instruction), instruction
    assert found.spilled_bytes == 0
    assert found.registers <= MOST_REGISTERS
    assert found.shared_bytes <= MOST_SHARED_BYTES[capability]


def test_every_specimen_has_a_title_of_its_own() -> None:
    """Titles tell kernels apart in reports."""
    titles = [specimen.title for specimen in SPECIMENS]
    assert len(set(titles)) == len(titles)
