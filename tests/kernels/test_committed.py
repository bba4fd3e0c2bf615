"""What is committed of compiled kernels is what the kernels here would give."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from esbench.report.kernels import PAGE, render_kernels
from esbench.studies.compiled_kernels import read_compilations
from impls.kernels.inspection import SPECIMENS
from impls.kernels.inspection.specimen import MOST_SHARED_BYTES

ROOT = Path(__file__).parents[2]
RESULTS, REPORTS = ROOT / "results", ROOT / "reports"


@pytest.mark.parametrize("capability", sorted(MOST_SHARED_BYTES))
def test_every_specimen_was_compiled(capability: int) -> None:
    """The study has all launches that are worth a look and no others: otherwise `nox -s kernels` is due."""
    study = read_compilations(RESULTS)
    assert study
    titles = sorted(one.title for one in study.found if one.capability == capability)
    assert titles == sorted(specimen.title for specimen in SPECIMENS)


def test_the_study_is_clean() -> None:
    """Of a revision, and without a launch that does not compile or spills."""
    study = read_compilations(RESULTS)
    assert study
    assert study.commit
    assert study.dirty is False
    assert not study.refused
    assert not [one.title for one in study.found if one.spilled_bytes]


def test_the_page_is_rendered_from_what_is_committed(tmp_path: Path) -> None:
    """The same results give the same bytes: after a new study `esbench report` is due."""
    (page,) = render_kernels(RESULTS, tmp_path)
    assert page.read_text(encoding="utf-8") == (REPORTS / f"{PAGE}.md").read_text(encoding="utf-8")
