"""The code that kernels compile to, without needing the GPU; `nox -s kernels` runs every check."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

import triton

from esbench import compiled as compiled_kernels
from esbench.compiled import Code, CompiledKernel, Executed, Record
from impls.kernels import autotune, compile_checks, gemm, launches, record, sparse
from impls.kernels.autotune import Task, Tunable
from impls.kernels.compile_checks import (
    WGMMA,
    Check,
    Compiled,
    checks,
    layer_operands,
    main,
    other_compiler,
)
from impls.kernels.tiling import Tiling

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
RECORD = compiled_kernels.read(record.PATH)


@pytest.fixture(autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile into a cache of this test session, which its workers share."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if base.name.startswith("popen-") else base
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


@pytest.mark.parametrize("check", ONE_PER_KERNEL, ids=lambda check: check.title)
def test_a_kernel_compiles_to_what_it_should(check: Check) -> None:
    """A kernel has its instruction, spills nothing, fits into shared memory and is like in the record."""
    compiled = check.compile(90)
    assert compiled.problems(check.instruction) == []
    assert compiled.changes(RECORD) == []
    if RECORD.triton != triton.__version__:
        pytest.skip(other_compiler(RECORD))  # the comparison above is only of descriptor loads


def test_every_check_is_in_the_record() -> None:
    """The record has each check, and nothing else."""
    assert [kernel.title for kernel in RECORD.kernels] == sorted(BY_TITLE)


KERNEL = CompiledKernel(
    title="a kernel",
    warps=8,
    registers=160,
    shared_bytes=200_000,
    code=Code(
        once=Executed(100, 0),
        tile=Executed(700, 0),
        steps=(Executed(200, 0), Executed(100, 524_288)),
        descriptor_loads=4,
    ),
)


def test_wrong_code_is_reported() -> None:
    """A missing instruction, spills and too much shared memory are reported.

    Predicated instructions are seen; labels, declarations and comments do not count.
    """
    compiled = Compiled(PTX, 90, 0, KERNEL)
    for instruction in ("popc.b32", "bra", "ld.global", WGMMA):
        assert compiled.problems(instruction) == []
    assert compiled.problems("begin") == ["has no begin"]
    kernel = msgspec.structs.replace(KERNEL, shared_bytes=163 * 1024 + 1)
    problems = ["has no mma.sync", "spills 4 bytes", "needs 166913 bytes of shared memory"]
    assert Compiled(PTX, 80, 4, kernel).problems(WGMMA) == problems


def test_a_kernel_is_compared_with_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a tolerance is reported; for another compiler only lost descriptor loads are."""
    monkeypatch.setattr(compile_checks, "triton", SimpleNamespace(__version__="3.7"))
    same, other = (Record(triton=version, kernels=(KERNEL,)) for version in ("3.7", "3.6"))

    def changed(recorded: Record, *, code: dict[str, Any] | None = None, **fields: Any) -> list[str]:
        fields["code"] = msgspec.structs.replace(KERNEL.code, **(code or {}))
        changes = Compiled("", 90, 0, msgspec.structs.replace(KERNEL, **fields)).changes(recorded)
        return [change.partition(":")[0].removeprefix("has ") for change in changes]

    loops = Executed(200, 0), Executed(106, 524_288)
    larger: list[tuple[dict[str, Any], str]] = [
        ({"registers": 176}, "176 registers instead of 160"),
        ({"registers": 144}, "144 registers instead of 160"),
        ({"shared_bytes": 205_000}, "205000 bytes of shared memory instead of 200000"),
        ({"warps": 4}, "4 warps instead of 8"),
        ({"code": {"steps": loops}}, "106 instructions in the main loop instead of 100"),
        ({"code": {"tile": Executed(801, 0)}}, "1101 other instructions instead of 1000"),
    ]
    for fields, change in larger:
        assert changed(same, **fields) == [change]
        assert changed(other, **fields) == []
    within = {"steps": (Executed(200, 0), Executed(105, 524_288)), "tile": Executed(800, 0)}
    assert changed(same, code=within, registers=168, shared_bytes=200_900) == []
    for recorded in (same, other):
        assert changed(recorded, code={"descriptor_loads": 3}) == ["3 descriptor loads instead of 4"]
        assert changed(recorded, title="new") == ["is not in the record"]


def test_a_spill_and_a_slower_loop_are_seen() -> None:
    """A kernel with more accumulators than registers is reported to spill, and to differ from the record."""
    small = sparse.TILING._replace(block_m=64, block_k=32, num_warps=1, num_stages=2)
    launch = launches.sparse_noise(layer_operands(torch.bfloat16), 1)
    compiled = BY_TITLE["sparse noise, k = 1, bfloat16"]._replace(launch=lambda: launch(small)).compile(90)
    assert f"spills {compiled.spilled_bytes} bytes" in compiled.problems("")
    assert any("1 warps instead of 8" in change for change in compiled.changes(RECORD))
    assert compiled.kernel.work
    assert compiled.kernel.work.iterations[-1] == 32  # channels are 1024


def test_the_command_prints_resources_or_the_reason_why_a_kernel_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A kernel that does not compile is exit code 1, and the command goes on; without triton it is 2."""
    check = BY_TITLE["picks, bfloat16"]
    broken = check._replace(title="picks that break", launch=Mock(side_effect=ValueError("one\ntwo")))
    monkeypatch.setattr(compile_checks, "checks", lambda: [broken, check, broken._replace(title="other")])
    path = tmp_path / "record.json"
    monkeypatch.setattr(record, "PATH", path)
    compiled_kernels.write(Record(triton=triton.__version__, kernels=(KERNEL,)), path)
    assert main(["--kernels", "picks*", "--capability", "90"]) == 1
    out, err = capsys.readouterr()
    assert err == (
        "kernels: picks that break for 90 does not compile: ValueError: one\n"
        "kernels: picks, bfloat16 for 90 is not in the record: run `python -m impls.kernels.compile_checks "
        "--record`\n"
    )
    resources = r"\d+ instructions in the main loop, \d+ registers, \d+ bytes of shared memory"
    assert re.fullmatch(rf"picks, bfloat16 for 90: {resources}\n", out)
    # Kernels without a check are dropped.
    assert main(["--kernels", "picks, *", "--record"]) == 0
    assert [kernel.title for kernel in compiled_kernels.read(path).kernels] == ["picks, bfloat16"]
    assert main(["--kernels", "picks, *", "--capability", "90"]) == 0
    compiled_kernels.write(Record(triton="3.0", kernels=(KERNEL,)), path)
    capsys.readouterr()
    assert main(["--kernels", "none"]) == 0
    assert capsys.readouterr().err.startswith("kernels: the record is of triton 3.0, this is ")
    monkeypatch.setattr(compile_checks, "triton", object())
    assert main([]) == 2
    assert "triton, which is for Linux only, is not installed here\n" in capsys.readouterr().err


def test_candidates_that_do_not_fit_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A candidate of the search for tile sizes fails if it does not compile or its programs do not fit."""
    candidates = (Tiling(64, 64, 64, 8, 4, 4, programs=4), Tiling(64, 48, 32), Tiling(64, 64, 32, 8, 4, 2))
    tunable = Tunable(launches.sparse_noise, candidates, [(1,)])
    monkeypatch.setattr(autotune, "TUNABLES", {"sparse": tunable})
    shape = autotune.SHAPES[0]
    monkeypatch.setattr(autotune, "TASKS", (Task("sparse", (*shape, 1)), Task("sparse", (2, 2, 2, 1))))
    assert main(["--candidates"]) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(
        r"kernels: sparse .* fits \d times on a multiprocessor\nkernels: .* does not .*\n", err
    )
    assert len(out.splitlines()) == 2
    monkeypatch.setattr(autotune, "TUNABLES", {"sparse": tunable._replace(candidates=candidates[2:])})
    assert main(["--candidates", "--kernels", "sparse*"]) == 0
