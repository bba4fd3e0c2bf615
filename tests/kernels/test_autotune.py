"""The search for tile sizes with a fake GPU, and the tables that launches look up."""

import os
import time
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from esbench import store
from esbench.errors import UserError
from impls.kernels import autotune, gemm, lowrank, tiling
from impls.kernels.autotune import (
    MIN_GAIN,
    TASKS,
    TUNABLES,
    Task,
    compile_all,
    fastest,
    main,
    relative_error,
    search,
    tolerance,
)
from impls.kernels.tiling import Configuration, Table, Tiling, read_table, round_up_sizes

ROOT = Path(__file__).parents[2]
FAST, SLOW, WRONG, BROKEN = (Tiling(block_m=32 << n) for n in range(4))
TASK = Task("made up", (1000, 512, 512))

TUNED = Configuration(
    kernel="low rank",
    sizes=(8192, 1024, 1024, 1),
    tiling=FAST,
    time_ns=90.0,
    default_ns=100.0,
    triton=triton.__version__,
)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pretend that this machine has a GPU named GPU 1, and return the path of its table."""
    monkeypatch.setattr(tiling, "FOLDER", tmp_path)
    monkeypatch.setattr(tiling, "tuned_tilings", tiling.tuned_tilings.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value="GPU 1"))
    return tmp_path / "gpu-1.json"


class FakeGpu:
    """Launches and times tile sizes, each of which takes a given number of nanoseconds.

    A launch writes ones, except with WRONG, which writes twos; BROKEN cannot be launched.
    """

    def __init__(self, times: Mapping[Tiling | None, float]) -> None:
        self.times = times
        self._last: Tiling | None = None
        self._y = torch.zeros(4)

    def launch(self, tiling: Tiling | None) -> Tensor:
        """Write the result into the same buffer each time, as kernels do."""
        self._last = tiling
        if tiling == BROKEN:
            raise RuntimeError
        return self._y.fill_(2.0 if tiling == WRONG else 1.0)

    def time_ns(self, call: Callable[[], object]) -> float:
        """Run a launch and return the time of its tile sizes."""
        call()
        return self.times[self._last]


def test_the_fastest_candidate_with_the_right_result_is_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Candidates that compute wrong results, write nothing or cannot run are dropped, however fast."""
    gpu = FakeGpu({None: 100.0, FAST: 80.0, SLOW: 120.0, WRONG: 1.0, BROKEN: 1.0})
    monkeypatch.setattr(autotune, "gpu_time_ns", gpu.time_ns)
    times, wrong = search(gpu.launch, [FAST, SLOW, WRONG, BROKEN])
    assert times == {None: 100.0, FAST: 80.0, SLOW: 120.0}
    assert wrong == [f"{WRONG} is wrong: relative error 1 against the default tile sizes"]
    assert capsys.readouterr().err == f"tune: {BROKEN} cannot be launched: RuntimeError\n"
    first = iter([150.0])
    monkeypatch.setattr(autotune, "gpu_time_ns", lambda call: next(first, gpu.time_ns(call)))
    assert search(gpu.launch, [FAST])[0] == {None: 100.0, FAST: 80.0}  # the default is timed again
    y = torch.zeros(4)
    _, wrong = search(lambda tiling: y if tiling == FAST else y.fill_(1.0), [FAST])
    assert wrong == [f"{FAST} is wrong: relative error inf against the default tile sizes"]
    near = 100 * (1 - MIN_GAIN)
    assert fastest({None: 100.0, FAST: near, SLOW: 120.0}) is None  # a gain of a percent is noise
    assert fastest({None: 100.0, FAST: near - 0.1, SLOW: 120.0}) == FAST
    expected = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        exact = expected.double().to(dtype)
        rounded = (exact.double() * (1 + torch.finfo(dtype).eps / 2)).to(dtype)
        assert relative_error(rounded, exact) <= tolerance(dtype)
        assert relative_error(exact * 1.05, exact) > tolerance(dtype)


def test_a_shape_has_the_tiles_of_its_bucket(path: Path) -> None:
    """Sizes that round up to the same powers of two share tiles; another dtype, kernel or device has none."""
    device: Any = SimpleNamespace(type="cuda", index=0)
    x: Any = SimpleNamespace(device=device, dtype=torch.bfloat16)
    assert tiling.find_tuned_tiling("low rank", x, 8192, 1024, 1024, 1) is None
    store.write_document(Table(configurations=(TUNED,)), path)
    assert tiling.find_tuned_tiling("low rank", x, 8192, 1024, 1024, 1) == FAST
    assert tiling.find_tuned_tiling("low rank", x, 5000, 513, 1000, 1) == FAST
    half: Any = SimpleNamespace(device=device, dtype=torch.half)
    for kernel, operand, sizes in (
        ("low rank", x, (8193, 1024, 1024, 1)),
        ("low rank", x, (8192, 1024, 1024, 2)),
        ("low rank", half, (8192, 1024, 1024, 1)),
        ("another", x, (8192, 1024, 1024, 1)),
        ("low rank", torch.zeros(1).bfloat16(), (8192, 1024, 1024, 1)),
    ):
        assert tiling.find_tuned_tiling(kernel, operand, *sizes) is None
    assert round_up_sizes([1, 2, 3, 1024, 1025]) == (1, 2, 4, 1024, 2048)
    path.write_text("{")
    # With a broken table the first launch raises an error instead of using its default tiles.
    with pytest.raises(UserError, match="not a table of tuned kernels") as error:
        tiling.find_tuned_tiling("low rank", x, 8192, 1024, 1024, 1)
    assert str(error.value).startswith(str(path))


def test_every_committed_table_can_be_read() -> None:
    """Each committed table is part of the package and names only kernels that exist."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["impls"]
    assert f"{tiling.FOLDER.relative_to(ROOT / 'impls')}/*.json" in data
    for path in tiling.FOLDER.glob("*.json"):
        assert {configuration.kernel for configuration in read_table(path).configurations} <= set(TUNABLES)


def test_a_launch_takes_given_tiles_then_tuned_ones_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch uses given tiles, else those tuned for the product's sizes and rank, else the default."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *_, **options: launched.append(options)

    monkeypatch.setattr(gemm, "product_kernel", Kernel())
    monkeypatch.setattr(lowrank, "down_product", Mock())
    lookup = Mock(side_effect=[Tiling(32, 16, 16, 2, 2, 2), None])
    monkeypatch.setattr(gemm, "find_tuned_tiling", lookup)
    x, weight, y = torch.zeros(1, 64, 1, 32), torch.zeros(48, 32), torch.zeros(1, 64, 1, 48)
    down, up = torch.zeros(64, 4, 32), torch.zeros(64, 4, 48)
    for chosen in (None, Tiling(16, 32, 16, num_warps=1), None):
        lowrank.low_rank_product(x, weight, down, up, 0.1, y, chosen)
    lookup.assert_called_with("low rank", x, 64, 48, 32, 4)
    default = lowrank.TILING.keep_warps(x.dtype).for_dtype(x.dtype)
    assert [launch["num_warps"] for launch in launched] == [2, 1, default.num_warps]
    assert [launch["BLOCK_M"] for launch in launched] == [32, 16, default.block_m]


def test_tuning_is_continued_and_wrong_candidates_are_an_exit_code(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tasks tuned with this triton, or without time left, are skipped; wrong candidates give exit code 1."""
    assert len({task.key for task in TASKS}) == len(TASKS)
    assert main([]) == 2
    assert capsys.readouterr().err == "tune: tuning needs a CUDA GPU, and torch sees none on this machine\n"
    monkeypatch.setattr(torch.cuda, "is_available", Mock(return_value=True))
    gpu = FakeGpu({None: 100.0, FAST: 80.0, WRONG: 1.0})
    made_up = Mock(launch=lambda *_: gpu.launch, candidates=[FAST, WRONG])
    right = Mock(launch=lambda *_: gpu.launch, candidates=[FAST, FAST._replace(block_n=9999)])
    monkeypatch.setattr(autotune, "TUNABLES", {"made up": made_up, "other": right})
    monkeypatch.setattr(autotune, "TASKS", (TASK, Task("other", (512, 512, 128))))
    monkeypatch.setattr(autotune, "gpu_time_ns", gpu.time_ns)
    compiled: list[list[Tiling]] = []
    monkeypatch.setattr(autotune, "compile_all", lambda _, tilings: compiled.append(tilings))
    seconds = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))

    def times() -> dict[str, float]:
        return {
            configuration.kernel: configuration.time_ns for configuration in read_table(path).configurations
        }

    old = msgspec.structs.replace(TUNED, kernel="made up", sizes=round_up_sizes(TASK.sizes), triton="2.0")
    store.write_document(Table(configurations=(TUNED, old)), path)
    assert main(["--seconds", "0"]) == 0
    assert "no time for 2 tasks: made up 1000x512x512, other 512x512x128\n" in capsys.readouterr().err
    assert main(["--seconds", "3"]) == 1
    assert compiled == [[None, FAST, WRONG]]  # compiled before the search
    assert f"{TASK}: {WRONG} is wrong" in (text := capsys.readouterr().err)
    assert "no time for 1 tasks: other" in text
    assert times() == {"low rank": 90.0, "made up": 80.0}
    gpu.times = {None: 100.0, FAST: 80.0, FAST._replace(block_n=512): 120.0}  # no tile exceeds the product
    assert main([]) == main(["--kernels", "made*"]) == 0
    assert f"[1/1] other 512x512x128: {FAST} takes 0.1 us, the default 0.1 us" in capsys.readouterr().err
    assert times() == {"low rank": 90.0, "made up": 80.0, "other": 80.0}
    path.unlink()
    right.launch = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        main([])
    assert times() == {"made up": 80.0}  # the table is written after each task
    path.write_text("{")
    assert main([]) == 2
    assert path.read_text() == "{"
    assert "not a table" in capsys.readouterr().err


def test_candidates_are_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are compiled into Triton's cache; one that does not compile does not affect the others."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = GPUTarget("cuda", 90, 32)
    no_gpu = SimpleNamespace(
        get_current_device=lambda: 7, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )
    monkeypatch.setattr(driver, "_active", no_gpu)
    compiled: list[Future[object]] = []

    class Pool(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            compiled.append(super().submit(*args, **kwargs))
            return compiled[-1]

    pool = Mock(wraps=Pool)
    monkeypatch.setattr(autotune, "ThreadPoolExecutor", pool)
    launch = TUNABLES["sparse"].launch((8192, 1024, 1024, 1), torch.bfloat16, torch.device("meta"))
    good, second, broken = Tiling(64, 64, 32, 8, 4, 2), Tiling(64, 32, 32, 8, 4, 2), Tiling(64, 48, 32)
    compile_all(launch, [good])  # alone: of two first compilations in a process, Triton once stored only one
    compile_all(launch, [good, second, broken])
    pool.assert_called_with(len(os.sched_getaffinity(0)))
    errors = [str(future.exception()) for future in compiled if future.exception()]
    assert not errors  # the broken one is refused before it is compiled
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2
