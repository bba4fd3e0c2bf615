"""The study of what kernels compile to: every specimen is in it, or why it is not."""

import importlib.util
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from esbench.studies.compiled_kernels import FILE, read_compilations
from impls.kernels import inspection
from impls.kernels.compilation import look, main
from impls.kernels.inspection import SPECIMENS
from impls.kernels.inspection.bits import PRODUCTS
from impls.kernels.inspection.specimen import MOST_SPILLED_BYTES, Inspection, inspect, problems

PTX = """
.visible .entry kernel(
    .param .u64 kernel_param_0
)
{
    .reg .pred %p<2>;
$L__BB0_1:
    mov.b32 %r1, 0;
    @%p1 ld.global.v4.b32 { %r2, %r3 }, [ %rd1 + 0 ];
    @!%p1 bra $L__BB0_1;
    // begin inline asm
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r5;
    cp.async.wait_group 1;
    popc.b32 %r4, %r3;
    ret;
}
"""


pytestmark = pytest.mark.usefixtures("compiled_once")


def test_instructions_are_counted_where_they_stand() -> None:
    """Whatever decides whether they run; labels, declarations and comments are none."""
    found = Inspection(PTX, 1, 0, 0)
    assert found.count("popc.b32") == 1
    assert found.count("ld.global", "cp.async.cg") == 2
    assert found.count("bra") == 1
    assert found.instructions == 7


def test_a_specimen_is_kept_with_what_it_compiles_to_or_why_it_does_not() -> None:
    """The others go on."""
    whole = PRODUCTS[0]
    broken = whole._replace(title="broken", constants={**whole.constants, "DEEP": "none"})
    study, wrong = look([broken, whole], [90])
    (one,), (refused,) = study.found, study.refused
    assert (one.title, one.capability, one.warps) == (whole.title, 90, whole.warps)
    assert one.instructions["popcount"] > 0
    assert one.instructions["all"] > one.instructions["popcount"] + one.instructions["global load"]
    assert (refused.title, refused.capability) == ("broken", 90)
    assert "Error" in refused.reason
    assert "\n" not in refused.reason
    assert wrong == [f"broken does not compile for 90: {refused.reason}"]


def test_code_that_is_not_what_it_should_be_is_reported() -> None:
    """Instructions that are missing, spills, and too much shared memory."""
    fine = Inspection(PTX, 255, spilled_bytes=MOST_SPILLED_BYTES, shared_bytes=227 * 1024)
    assert problems(PRODUCTS[0], 90, fine) == []
    worse = Inspection("", 255, spilled_bytes=MOST_SPILLED_BYTES + 4, shared_bytes=227 * 1024 + 1)
    assert problems(PRODUCTS[0], 90, worse) == [
        "has no popc.b32",
        "spills 20 bytes",
        "needs 232449 bytes of shared memory",
    ]


def test_a_spill_is_seen() -> None:
    """A kernel with more sums than registers keeps some on its stack."""
    sparse = next(one for one in SPECIMENS if one.title == "sparse noise, k = 1, bfloat16")
    small = sparse._replace(constants={**sparse.constants, "ROWS": 64, "DEEP": 32}, warps=1, stages=2)
    assert inspect(sparse, 90).spilled_bytes == 0
    assert inspect(small, 90).spilled_bytes > MOST_SPILLED_BYTES


def test_the_study_is_written_where_the_page_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no triton one line says so, with exit code 2 and nothing written."""
    monkeypatch.setattr(inspection, "SPECIMENS", PRODUCTS[:1])
    assert main(["--out", str(tmp_path / FILE)]) == 0
    study = read_compilations(tmp_path)
    assert study
    assert [one.capability for one in study.found] == [80, 90]
    monkeypatch.setattr(importlib.util, "find_spec", Mock(return_value=None))
    assert main(["--out", str(tmp_path / "other.json")]) == 2
    assert "triton, which is for Linux only, is not installed here\n" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists()
