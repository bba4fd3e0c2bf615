"""What fused kernels compile to: the instructions that count, no spills, and room for them on a GPU."""

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels.inspection import SPECIMENS
from impls.kernels.inspection.specimen import Specimen, inspect, problems
from tests.kernels import one_per_kernel

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.parametrize(
    "specimen",
    one_per_kernel(SPECIMENS),
    ids=lambda specimen: specimen.title,
)
def test_a_kernel_compiles_to_what_it_should(specimen: Specimen) -> None:
    """It has the instructions that make it fast, does not spill, and fits a GPU of capability 9.0.

    `nox -s kernels` checks every launch for capabilities 8.0 and 9.0.
    """
    assert problems(specimen, 90, inspect(specimen, 90)) == []


def test_every_specimen_has_a_title_of_its_own() -> None:
    """Titles tell kernels apart in reports."""
    titles = [specimen.title for specimen in SPECIMENS]
    assert len(set(titles)) == len(titles)
