"""The code that kernels compile to, without needing the GPU; `nox -s kernels` runs every check."""

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from esbench.studies.kernels import FILE, PAGE, Compilation, read_compilations, render
from impls.kernels import compile_checks, launches, sparse
from impls.kernels.compile_checks import (
    CAPABILITIES,
    WGMMA,
    Check,
    Compiled,
    checks,
    compile_check,
    main,
    operands,
    run,
)

ROOT = Path(__file__).parents[2]
RESULTS, REPORTS = ROOT / "results", ROOT / "reports"

PTX = """
    .reg .pred %p<2>;
$L__BB0_1:
    @%p1 ld.global.v4.b32 { %r2, %r3 }, [ %rd1 + 0 ];
    @!%p1 bra $L__BB0_1;
    // begin inline asm
    popc.b32 %r4, %r3;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16;
"""
USAGE = Compilation(
    title="made up",
    kernel="kernel",
    capability=90,
    warps=4,
    stages=3,
    registers=255,
    shared_bytes=0,
    spilled_bytes=0,
)

ONE_PER_KERNEL = list({check.kernel: check for check in reversed(checks())}.values())
BY_TITLE = {check.title: check for check in checks()}


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile into a cache of this test session, which its workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


@pytest.mark.parametrize("check", ONE_PER_KERNEL, ids=lambda check: check.kernel.__name__)
def test_a_kernel_compiles_to_what_it_should(check: Check) -> None:
    """A kernel has the instructions that make it fast, spills no registers and fits into shared memory."""
    compiled = compile_check(check, 90)
    assert check.problems(compiled) == []
    assert compiled.usage.registers <= 255


def test_wrong_code_is_reported() -> None:
    """Missing or forbidden instructions, spills, too much shared memory and repeated draws are reported.

    Predicated instructions count; labels, declarations and comments do not.
    """
    check = Check("made up", Mock(), Mock(), ("popc.b32", "bra", "ld.global", WGMMA), ("begin", "atom"))
    assert check.problems(Compiled(PTX, USAGE)) == []
    older = msgspec.structs.replace(USAGE, capability=80, shared_bytes=163 * 1024 + 1, spilled_bytes=4)
    assert check.problems(Compiled(PTX.replace("popc", "atom"), older)) == [
        "has no popc.b32",
        "has no mma.sync",
        "has atom",
        "spills 4 bytes",
        "needs 166913 bytes of shared memory",
    ]
    check = Check("made up", Mock(), Mock(), calls=["CALLS"])
    drawn = Compiled("mul.hi.u32\n" * 44, USAGE, {"CALLS": 256, "SIGN": False})
    assert check.problems(drawn) == []
    drawn = drawn._replace(ptx=drawn.ptx + "mul.wide.u32")
    assert check.problems(drawn) == ["has 45 wide multiplications, more than 44"]


def test_a_spill_is_seen() -> None:
    """A kernel with more accumulators than registers is reported to spill."""
    small = sparse.TILING._replace(block_m=64, block_k=32, num_warps=1, num_stages=2)
    check = BY_TITLE["sparse noise, k = 1, bfloat16"]
    launch = launches.sparse_noise(operands(torch.bfloat16), 1)
    compiled = compile_check(dataclasses.replace(check, launch=lambda: launch(small)), 90)
    assert f"spills {compiled.usage.spilled_bytes} bytes" in check.problems(compiled)


def test_a_run_has_every_launch_or_the_reason_why_it_does_not_compile() -> None:
    """A kernel that does not compile is listed with its reason, and the run continues."""
    check = BY_TITLE["picks, bfloat16"]
    broken = dataclasses.replace(check, title="broken", launch=Mock(side_effect=ValueError("one\ntwo")))
    document, problems = run([broken, check], [90])
    (compiled,), (refused,) = document.found, document.refused
    assert (compiled.title, compiled.capability, compiled.warps) == (check.title, 90, 4)
    assert compiled.registers > 0
    assert (refused.title, refused.capability, refused.reason) == ("broken", 90, "ValueError: one")
    assert problems == ["broken does not compile for 90: ValueError: one"]


def test_the_command_writes_what_the_report_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes the report's input file; without triton it exits with code 2 and writes nothing."""
    assert main(["--out", str(tmp_path / FILE), "--kernels", "picks*", "--capability", "90"]) == 0
    study = read_compilations(tmp_path)
    assert study
    assert [(launch.title, launch.capability) for launch in study.found] == [("picks, bfloat16", 90)]
    monkeypatch.setattr(compile_checks, "triton", object())
    assert main(["--out", str(tmp_path / "other.json")]) == 2
    assert "triton, which is for Linux only, is not installed here\n" in capsys.readouterr().err
    assert not (tmp_path / "other.json").exists()


def test_the_committed_run_is_complete_and_clean() -> None:
    """The committed run has a commit, all current checks and no spills; otherwise run `nox -s kernels`."""
    assert len(BY_TITLE) == len(checks())
    study = read_compilations(RESULTS)
    assert study
    assert study.commit
    assert study.dirty is False
    assert not study.refused
    for capability in CAPABILITIES:
        titles = [launch.title for launch in study.found if launch.capability == capability]
        assert sorted(titles) == sorted(BY_TITLE)
    assert not [launch.title for launch in study.found if launch.spilled_bytes]


def test_the_page_is_rendered_from_what_is_committed(tmp_path: Path) -> None:
    """The committed page is rendered from the committed results; after a new run, run `esbench report`."""
    (page,) = render(RESULTS, tmp_path)
    assert page.read_text(encoding="utf-8") == (REPORTS / PAGE).read_text(encoding="utf-8")
