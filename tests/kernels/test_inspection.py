"""What fused kernels compile to: the instructions that count, no spills, and room for them on a GPU."""

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels.inspection import SPECIMENS
from impls.kernels.inspection.specimen import Specimen, inspect, problems

pytestmark = pytest.mark.usefixtures("compiled_once")


WIDE = ("float32", "tfloat32", "float64")


@pytest.mark.parametrize(
    "specimen",
    [one for one in SPECIMENS if not one.title.endswith(WIDE)],
    ids=lambda specimen: specimen.title,
)
def test_a_kernel_compiles_to_what_it_should(specimen: Specimen) -> None:
    """It has the instructions that make it fast, does not spill, and fits a GPU of capability 9.0.

    `nox -s kernels` does the same for wider dtypes and for capability 8.0.
    """
    assert problems(specimen, 90, inspect(specimen, 90)) == []


def test_every_specimen_has_a_title_of_its_own() -> None:
    """Titles tell kernels apart in reports."""
    titles = [specimen.title for specimen in SPECIMENS]
    assert len(set(titles)) == len(titles)
