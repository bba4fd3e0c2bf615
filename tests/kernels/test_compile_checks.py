"""The code that kernels compile to, without needing the GPU; `nox -s kernels` runs every check."""

import re
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels import compile_checks, gemm, launches, sparse
from impls.kernels.compile_checks import WGMMA, Check, Compiled, checks, layer_operands, main

PTX = """
    .reg .pred %p<2>;
$L__BB0_1:
    @%p1 ld.global.v4.b32 { %r2, %r3 }, [ %rd1 + 0 ];
    @!%p1 bra $L__BB0_1;
    // begin inline asm
    popc.b32 %r4, %r3;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16;
"""
# The kernel of products has a check for each noise, the first of its dtypes.
ONE_PER_KERNEL = list(
    {
        (check.kernel, check.title.split(",")[0] if check.kernel is gemm.product_kernel else ""): check
        for check in reversed(checks())
    }.values()
)
BY_TITLE = {check.title: check for check in checks()}
assert len(BY_TITLE) == len(checks())


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile into a cache of this test session, which its workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


@pytest.mark.parametrize("check", ONE_PER_KERNEL, ids=lambda check: check.title)
def test_a_kernel_compiles_to_what_it_should(check: Check) -> None:
    """A kernel has the instruction that makes it fast, spills no registers and fits into shared memory."""
    assert check.compile(90).problems(check.instruction) == []


def test_wrong_code_is_reported() -> None:
    """A missing instruction, spills and too much shared memory are reported.

    Predicated instructions are seen; labels, declarations and comments do not count.
    """
    compiled = Compiled(PTX, 90, registers=255, spilled_bytes=0, shared_bytes=0)
    for instruction in ("popc.b32", "bra", "ld.global", WGMMA):
        assert compiled.problems(instruction) == []
    assert compiled.problems("begin") == ["has no begin"]
    older = Compiled(PTX, 80, registers=255, spilled_bytes=4, shared_bytes=163 * 1024 + 1)
    problems = ["has no mma.sync", "spills 4 bytes", "needs 166913 bytes of shared memory"]
    assert older.problems(WGMMA) == problems


def test_a_spill_is_seen() -> None:
    """A kernel with more accumulators than registers is reported to spill."""
    small = sparse.TILING._replace(block_m=64, block_k=32, num_warps=1, num_stages=2)
    launch = launches.sparse_noise(layer_operands(torch.bfloat16), 1)
    compiled = BY_TITLE["sparse noise, k = 1, bfloat16"]._replace(launch=lambda: launch(small)).compile(90)
    assert f"spills {compiled.spilled_bytes} bytes" in compiled.problems("")


def test_the_command_prints_resources_or_the_reason_why_a_kernel_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that does not compile is exit code 1, and the command goes on; without triton it is 2."""
    check = BY_TITLE["picks, bfloat16"]
    broken = check._replace(title="picks that break", launch=Mock(side_effect=ValueError("one\ntwo")))
    monkeypatch.setattr(compile_checks, "checks", lambda: [broken, check, broken._replace(title="other")])
    assert main(["--kernels", "picks*", "--capability", "90"]) == 1
    out, err = capsys.readouterr()
    assert err == "kernels: picks that break for 90 does not compile: ValueError: one\n"
    assert re.fullmatch(r"picks, bfloat16 for 90: \d+ registers, \d+ bytes of shared memory\n", out)
    assert main(["--kernels", "picks, *", "--capability", "90"]) == 0
    monkeypatch.setattr(compile_checks, "triton", object())
    assert main([]) == 2
    assert "triton, which is for Linux only, is not installed here\n" in capsys.readouterr().err
