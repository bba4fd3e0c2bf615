"""The search for tile sizes: its loop with a fake compiler and clock, its table, and compiled candidates."""

import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")
import triton

from esbench import store
from esbench.errors import UserError
from impls.kernels import autotune, lowrank
from impls.kernels.autotune import (
    LEAST_GAIN,
    SCHEMA,
    SHARED_LIMIT,
    TASKS,
    Compiled,
    Compiler,
    Configuration,
    Launch,
    OutOfTimeError,
    Table,
    Task,
    Tunable,
    bucket,
    distance,
    main,
    pruned,
    read_table,
    search,
    tolerance,
    tunables,
    tune,
)
from impls.kernels.rows import Tiling

ROOT = Path(__file__).parent.parent.parent
LIMIT = SHARED_LIMIT[90]
DEFAULT, FAST, SLOW, WRONG, BROKEN = (Tiling(rows=16 << n) for n in range(5))
GOOD = Compiled(registers=100, stack_bytes=0, shared_bytes=1000)
TASK = Task("made up", (1000, 512, 512))

FOUND = Configuration(
    kernel="low rank",
    dtype="bfloat16",
    sizes=(8192, 1024, 1024, 1),
    time_ns=90.0,
    default_ns=100.0,
    triton=triton.__version__,
    **FAST._asdict(),
)


def table(*found: Configuration, schema: int = SCHEMA) -> Table:
    """Make the table of a GPU that does not exist."""
    return Table(schema=schema, device_name="GPU 1", found=found)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tables in a folder for this test, on a machine whose GPU is called GPU 1."""
    monkeypatch.setattr(autotune, "FOLDER", tmp_path)
    monkeypatch.setattr(autotune, "tilings", autotune.tilings.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value="GPU 1"))
    return tmp_path


def on_gpu(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Stand in for a tensor on a GPU."""
    return SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), dtype=dtype)


class FakeGpu:
    """Launches and times tile sizes; what each takes is given, in nanoseconds.

    The result is of ones. That of WRONG is something else, and BROKEN cannot be launched.
    """

    def __init__(self, times: Mapping[Tiling, float]) -> None:
        """Launch these tile sizes."""
        self.times = times
        self.timed: list[Tiling] = []
        self._last = DEFAULT
        self._y = torch.zeros(4)

    def launch(self, tiling: Tiling) -> Tensor:
        """Write the result in place of the last one, as kernels do."""
        self._last = tiling
        if tiling == BROKEN:
            message = "out of resource\nand more words"
            raise RuntimeError(message)
        return self._y.fill_(2.0 if tiling == WRONG else 1.0)

    def time_ns(self, call: Callable[[], object]) -> float:
        """Time a launch."""
        call()
        self.timed.append(self._last)
        return self.times[self._last]


def compile_all(_task: Task, tilings: Sequence[Tiling], _until: float = 0.0) -> dict[Tiling, Compiled | str]:
    """Stand in for a compiler that has no trouble."""
    return dict.fromkeys(tilings, GOOD)


def test_the_fastest_candidate_is_found_and_others_are_dropped_with_their_reason() -> None:
    """However fast it is, what computes something else or does not run is not chosen."""
    large, spilling, failed = (Tiling(columns=16 << n) for n in range(3))
    gpu = FakeGpu({DEFAULT: 100.0, FAST: 80.0, SLOW: 120.0, WRONG: 1.0, BROKEN: 1.0})
    compiled: dict[Tiling, Compiled | str] = {
        **compile_all(TASK, list(gpu.times)),
        large: GOOD._replace(shared_bytes=LIMIT + 1),
        spilling: GOOD._replace(stack_bytes=1000),
        failed: "CompilationError: at 1:1",
    }
    found = search(gpu.launch, compiled, gpu.time_ns, LIMIT)
    assert (found.tiling, found.time_ns, found.default_ns) == (FAST, 80.0, 100.0)
    assert (found.timed, found.wrong) == (3, 1)
    assert found.dropped == {
        WRONG: "is wrong: off by 1 of the default's norm",
        BROKEN: "RuntimeError: out of resource",
        large: f"needs {LIMIT + 1} bytes of shared memory, a program can have {LIMIT}",
        spilling: "spills 1000 bytes",
        failed: "CompilationError: at 1:1",
    }


def test_a_candidate_that_writes_nothing_is_wrong() -> None:
    """Although the numbers of the launch before it are the right ones."""
    y = torch.zeros(4)

    def launch(tiling: Tiling) -> Tensor:
        return y if tiling == FAST else y.fill_(1.0)

    found = search(launch, compile_all(TASK, [DEFAULT, FAST, SLOW]), lambda _: 1.0, LIMIT)
    assert found.dropped == {FAST: "is wrong: off by inf of the default's norm"}


def test_the_default_stays_without_a_gain() -> None:
    """A gain of a percent is noise."""
    near = 100 * (1 - LEAST_GAIN)
    for time_ns, best in ((near, DEFAULT), (near - 0.1, FAST)):
        gpu = FakeGpu({DEFAULT: 100.0, FAST: time_ns})
        assert search(gpu.launch, compile_all(TASK, [DEFAULT, FAST]), gpu.time_ns, LIMIT).tiling == best


def test_the_fastest_are_timed_again_in_rounds_with_the_default() -> None:
    """All candidates are timed once, the best in turns: what drifts, drifts for all of them."""
    others = [Tiling(group=group) for group in (1, 2, 3, 4, 5)]
    gpu = FakeGpu({DEFAULT: 9.0, **{one: float(one.group) for one in others}})
    search(gpu.launch, compile_all(TASK, [DEFAULT, *others]), gpu.time_ns, LIMIT)
    turn = [DEFAULT, *others[: autotune.FINALISTS]]
    assert gpu.timed == [DEFAULT, *others, *turn * autotune.ROUNDS]


def test_results_may_differ_by_rounding_only() -> None:
    """Sums in another order do; NaN is infinitely far off."""
    expected = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        exact = expected.double().to(dtype)
        rounded = (exact.double() * (1 + torch.finfo(dtype).eps / 2)).to(dtype)
        assert distance(rounded, exact) <= tolerance(dtype)
        assert distance(exact * 1.05, exact) > tolerance(dtype)
    assert distance(torch.full((3,), torch.nan), torch.ones(3)) == float("inf")


def test_every_task_is_saved_at_once_and_the_time_left_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """A default that cannot be launched fails its task alone."""
    gpu = FakeGpu({DEFAULT: 100.0, FAST: 80.0, WRONG: 1.0})
    tasks = [Task(name, (1, 1, 1)) for name in "abc"]
    plan = {task: [DEFAULT, FAST, WRONG] for task in tasks}
    plan[tasks[1]] = [BROKEN, FAST]
    saved: list[tuple[Task, Tiling]] = []
    left, problems = tune(
        plan,
        lambda _: gpu.launch,
        compile_all,
        gpu.time_ns,
        lambda task, found: saved.append((task, found.tiling)),
        LIMIT,
    )
    assert saved == [(tasks[0], FAST), (tasks[2], FAST)]
    assert (left, problems) == ([], 3)
    text = capsys.readouterr().err
    assert "tune: b 1x1x1: could not be tuned: RuntimeError: out of resource\n" in text
    assert "tune: a 1x1x1: 128x128x64, 8 warps, 3 stages is wrong: off by 1 of the default's norm\n" in text
    assert (
        "tune: [1/3] a 1x1x1: 32x128x64, 8 warps, 3 stages takes 0.1 us, the default 0.1 us; "
        "2 of 3 candidates timed; 0 s, about 0 s left\n"
    ) in text


def test_it_stops_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished is saved; a task that would take longer than what is left is not begun."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def slow(_call: Callable[[], object]) -> float:
        nonlocal now
        now += 1.0
        return 100.0

    tasks = [Task(name, (1, 1, 1)) for name in "abcd"]
    plan = {task: [DEFAULT] for task in tasks}
    each = 1 + autotune.ROUNDS
    gpu, saved = FakeGpu({}), Mock()
    for seconds, count in ((each + 1, 1), (2 * each, 2), (3 * each - 1, 2)):
        saved.reset_mock()
        now = 0.0
        left, problems = tune(plan, lambda _: gpu.launch, compile_all, slow, saved, LIMIT, until=seconds)
        assert [call.args[0] for call in saved.call_args_list] == tasks[:count]
        assert (left, problems) == (tasks[count:], 0)
    now = 0.0
    with pytest.raises(OutOfTimeError):
        search(gpu.launch, compile_all(TASK, [DEFAULT]), slow, LIMIT, until=3.0)


def test_a_shape_has_the_tiles_of_its_bucket(folder: Path) -> None:
    """Sizes up to the same powers of two share them; another dtype, kernel, bucket or GPU has none."""
    store.write_document(table(FOUND), folder / "gpu-1.json")
    assert autotune.tuned("low rank", on_gpu(), 8192, 1024, 1024, 1) == FAST
    assert autotune.tuned("low rank", on_gpu(), 5000, 513, 1000, 1) == FAST
    assert autotune.tuned("low rank", on_gpu(), 8193, 1024, 1024, 1) is None
    assert autotune.tuned("low rank", on_gpu(), 8192, 1024, 1024, 2) is None
    assert autotune.tuned("low rank", on_gpu(torch.float16), 8192, 1024, 1024, 1) is None
    assert autotune.tuned("another", on_gpu(), 8192, 1024, 1024, 1) is None
    assert autotune.tuned("low rank", torch.zeros(1), 8192, 1024, 1024, 1) is None
    (folder / "gpu-1.json").unlink()
    assert autotune.tuned("low rank", on_gpu(), 8192, 1024, 1024, 1) is None
    assert bucket([1, 2, 3, 1024, 1025]) == (1, 2, 4, 1024, 2048)


TEXT = msgspec.json.encode(table(FOUND)).decode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not a table of tuned kernels"),
        (TEXT.replace('"warps":8', '"warps":0'), "warps"),
        (TEXT.replace('"deep"', '"depth"'), "depth"),
        (msgspec.json.encode(table(schema=9)).decode(), "schema 9"),
        (TEXT.replace("GPU 1", "GPU 2"), "is the table of GPU 2, this GPU is GPU 1"),
    ],
    ids=["half", "warps", "field", "version", "another"],
)
def test_a_table_that_cannot_be_read_is_one_error_that_names_the_file(
    folder: Path, content: str, words: str
) -> None:
    """Raised when the first kernel is launched, which does not use its default instead."""
    (folder / "gpu-1.json").write_text(content)
    with pytest.raises(UserError, match=words) as error:
        autotune.tuned("low rank", on_gpu(), 8192, 1024, 1024, 1)
    assert str(error.value).startswith(str(folder / "gpu-1.json"))
    assert "\n" not in str(error.value)


def test_every_committed_table_can_be_read() -> None:
    """Each is named for its device, is part of the package, and is for kernels that exist."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["impls"]
    assert f"{autotune.FOLDER.relative_to(ROOT / 'impls')}/*.json" in data
    for path in autotune.FOLDER.glob("*.json"):
        found = read_table(path, msgspec.json.decode(path.read_bytes())["device_name"])
        assert autotune.path_of(found.device_name) == path
        assert {one.kernel for one in found.found} <= set(tunables())


def test_a_launcher_without_tiles_takes_what_was_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its default where nothing was; tile sizes that it is given come first."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *_, **options: launched.append(options)

    monkeypatch.setattr(lowrank, "low_rank_kernel", Kernel())
    asked = Mock(return_value=Tiling(rows=32, columns=16, deep=16, group=2, warps=2, stages=2))
    x, weight, y = torch.zeros(1, 64, 1, 32), torch.zeros(48, 32), torch.zeros(1, 64, 1, 48)
    down, up = torch.zeros(64, 4, 32), torch.zeros(64, 4, 48)
    monkeypatch.setattr(autotune, "tuned", asked)
    lowrank.low_rank_product(x, weight, down, up, 0.1, y)
    asked.assert_called_once_with("low rank", x, 64, 48, 32, 4)
    lowrank.low_rank_product(x, weight, down, up, 0.1, y, Tiling(rows=16, columns=32, deep=16, warps=1))
    monkeypatch.setattr(autotune, "tuned", Mock(return_value=None))
    lowrank.low_rank_product(x, weight, down, up, 0.1, y)
    default = lowrank.tiling_of(4).suited(x.dtype)
    assert [one["num_warps"] for one in launched] == [2, 1, default.warps]
    assert [one["ROWS"] for one in launched] == [32, 16, default.rows]


def test_tasks_name_kernels_and_differ() -> None:
    """Every kernel has tasks, each with an entry of its own; the shapes with a goal come first."""
    assert {task.kernel for task in TASKS} == set(tunables())
    assert len({task.key for task in TASKS}) == len(TASKS)
    assert all(task.sizes[:3] == (8192, 1024, 1024) for task in TASKS[:13])


def test_candidates_that_cannot_run_are_pruned() -> None:
    """Those that are too large for the shared memory; those larger than the result become smaller ones."""
    large, small, same = Tiling(256, 256, 128, 8, 8, 4), Tiling(64, 64, 32), Tiling(64, 64, 64)
    kernel = Tunable(Mock(), lambda _: large, (large, small, same, Tiling(128, 128, 128, 8, 8, 4)))
    assert pruned(kernel, (1024, 1024, 1024), LIMIT) == [large, small, same, kernel.candidates[-1]]
    assert pruned(kernel, (1024, 1024, 1024), 99 * 1024) == [large, small, same]
    assert pruned(kernel, (64, 64, 32), LIMIT) == [Tiling(64, 64, 32, 8, 8, 4), small]


LAUNCH_ON_CPU = """
import torch, triton
from impls.kernels import autotune
from impls.kernels.autotune import Task, Tiling

autotune._start_compiling(90)
triton.knobs.compilation.listener = lambda cache_hit, **_: print(cache_hit)
task = {task!r}
launch = autotune.tunables()[task.kernel].set_up(task.sizes, autotune.DTYPE, torch.device("cpu"))
launch({good!r})
"""


def test_candidates_are_compiled_by_other_processes_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of the code; what does not compile has its reason; spills are seen."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    task = next(task for task in TASKS if task.kernel == "sparse")
    good, spilling, bad = Tiling(64, 64, 32, 8, 4, 2), Tiling(64, 128, 32, 8, 1, 2), Tiling(64, 48, 32)
    tilings = [good, spilling, bad]
    with Compiler({task: tilings}, 90, 1) as compiler:
        found = compiler.results(task, tilings, time.monotonic() + 100)
        assert compiler.results(task, [good], 0.0) == {good: found[good]}
    one, other, reason = (found[tiling] for tiling in tilings)
    assert isinstance(one, Compiled)
    assert one.shared_bytes >= 2 * (64 + 64) * 32
    assert 32 < one.registers < 256
    assert one.obstacle(LIMIT) == ""
    assert isinstance(other, Compiled)
    assert other.obstacle(LIMIT) == f"spills {other.stack_bytes} bytes"
    assert isinstance(reason, str)
    assert "power of 2" in reason
    assert len(list(tmp_path.glob("*/*.cubin"))) == 2
    # A launch with real operands finds the code in the cache.
    command = [sys.executable, "-c", LAUNCH_ON_CPU.format(good=good, task=task)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    started = time.monotonic()
    with Compiler({task: [good]}, 90, 1) as compiler:
        assert compiler.results(task, [good], 0.0) == {good: "was not compiled in time"}
    assert time.monotonic() - started < 30


def test_what_is_launched_is_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--compile`` the code of each task is in the cache, and what was not compiled is an exit code."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    task = next(task for task in TASKS if task.kernel == "sparse")
    monkeypatch.setattr(autotune, "TASKS", (task,))
    assert main(["--compile", "--processes", "1", "--seconds", "0.001"]) == 1
    assert "was not compiled in time\ntune: 0 of 1 tasks are compiled" in capsys.readouterr().err
    assert main(["--compile", "--processes", "1"]) == 0
    assert len(list(tmp_path.glob("*/*.cubin"))) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and tuning it takes minutes")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    """With exit code 2, and nothing written."""
    command = [sys.executable, "-m", "impls.kernels.autotune", "--out", str(tmp_path / "table.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tune: tuning needs a CUDA GPU, and torch sees none on this machine for 'cuda'\n"
    assert not list(tmp_path.iterdir())


def test_a_dry_run_lists_tasks_and_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """With the candidates that are left after pruning and an estimate of the time."""
    assert main(["--dry-run", "--kernels", "low rank", "--processes", "10"]) == 0
    *listed, estimate = capsys.readouterr().out.splitlines()
    assert len(listed) == len([task for task in TASKS if task.kernel == "low rank"])
    assert listed[0].startswith("low rank 8192x1024x1024x1: 13 candidates: 128x128x64, 8 warps, 3 stages; ")
    assert estimate.startswith("6 tasks with ")
    assert main(["--dry-run", "--kernels", "nothing*"]) == 2
    assert "no kernel matches 'nothing*'; there are: hadamard, " in capsys.readouterr().err


@pytest.fixture
def search_of_two(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Table]]:
    """Run the command for two made-up tasks on a fake GPU; return its exit code and the table."""
    gpu = FakeGpu({DEFAULT: 100.0, FAST: 80.0, WRONG: 1.0})

    class FakeCompiler(Mock):
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        results = staticmethod(compile_all)

    def set_up(_sizes: object, _dtype: object, _device: object) -> Launch:
        return gpu.launch

    def run(*arguments: str, candidates: Sequence[Tiling] = (FAST,)) -> tuple[int, Table]:
        made_up = Tunable(set_up, lambda _: DEFAULT, candidates)
        monkeypatch.setattr(autotune, "tunables", lambda: {"made up": made_up, "other": made_up})
        return main(arguments), read_table(folder / "gpu-1.json", "GPU 1")

    monkeypatch.setattr(autotune, "TASKS", (TASK, Task("other", (512, 512, 512))))
    monkeypatch.setattr(autotune, "Compiler", FakeCompiler)
    monkeypatch.setattr(autotune, "gpu_time_ns", gpu.time_ns)
    monkeypatch.setattr(torch.cuda, "is_available", Mock(return_value=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=(9, 0)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return run


def test_a_table_is_continued(
    search_of_two: Callable[..., tuple[int, Table]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other entries stay; what this triton has tuned is skipped, unless it is asked for again."""
    old = msgspec.structs.replace(FOUND, kernel="made up", sizes=bucket(TASK.sizes))
    store.write_document(table(FOUND, old), folder / "gpu-1.json")
    code, found = search_of_two()
    assert code == 0
    assert [(one.kernel, one.default_ns, one.time_ns) for one in found.found] == [
        ("low rank", 100.0, 90.0),
        ("made up", 100.0, 90.0),
        ("other", 100.0, 80.0),
    ]
    assert "1 tasks are in the table" in capsys.readouterr().err
    code, found = search_of_two("--again", "--kernels", "made*")
    assert [one.time_ns for one in found.found] == [90.0, 80.0, 80.0]
    store.write_document(table(msgspec.structs.replace(old, triton="2.0")), folder / "gpu-1.json")
    code, found = search_of_two("--kernels", "made*")
    assert [(one.time_ns, one.triton) for one in found.found] == [(80.0, triton.__version__)]


def test_wrong_candidates_are_an_exit_code(search_of_two: Callable[..., tuple[int, Table]]) -> None:
    """The others are stored all the same."""
    code, found = search_of_two(candidates=(FAST, WRONG))
    assert code == 1
    assert [one.tiling.rows for one in found.found] == [FAST.rows, FAST.rows]


def test_a_table_that_cannot_be_read_is_replaced_if_asked(
    search_of_two: Callable[..., tuple[int, Table]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise it stays as it is."""
    path = folder / "gpu-1.json"
    path.write_text("{")
    assert main([]) == 2
    assert path.read_text() == "{"
    assert "tune: " in capsys.readouterr().err
    code, found = search_of_two("--again")
    assert (code, len(found.found)) == (0, 2)


def test_seconds_end_a_search_that_says_what_is_left(
    search_of_two: Callable[..., tuple[int, Table]], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 0: another call continues."""
    store.write_document(table(), folder / "gpu-1.json")
    code, found = search_of_two("--seconds", "0")
    assert (code, found.found) == (0, ())
    assert "no time for 2 tasks: made up 1000x512x512, other 512x512x512\n" in capsys.readouterr().err
