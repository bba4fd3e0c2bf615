"""Tiles that were tuned: which are chosen, how a table is looked up, and what is said where there is none."""

import math
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from esbench import documents
from esbench.errors import UserError
from impls.kernels import lowrank, tuned
from impls.kernels.rows import Tiling
from impls.kernels.tuned import SCHEMA, Configuration, Table, bucket, read_table
from impls.kernels.tuning.__main__ import main
from impls.kernels.tuning.choice import LEAST_GAIN, fastest, interleaved, survivors
from impls.kernels.tuning.contest import contest, distance, tolerance
from impls.kernels.tuning.tunable import Launch, Task, Tunable, grid
from impls.kernels.tuning.tunables import TUNABLES

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
DEFAULT, FAST, SLOW, WRONG, TALL = (Tiling(rows=16 << n) for n in range(5))
TASK = Task(torch.float32, (1000, 512))

FOUND = Configuration(
    kernel="low rank",
    dtype="bfloat16",
    sizes=(8192, 1024, 1024, 1),
    time_ns=90.0,
    default_ns=100.0,
    **FAST._asdict(),
)


def table(*found: Configuration, schema: int = SCHEMA) -> Table:
    """Make the table of a GPU that does not exist."""
    return Table(
        schema=schema,
        device_name="GPU 1",
        torch="2.13.0",
        triton="3.7.1",
        commit=None,
        dirty=None,
        found=found,
    )


TEXT = msgspec.json.encode(table(FOUND)).decode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep tables in a folder of the test's own, on a machine whose GPU is called GPU 1."""
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tuned, "tilings", tuned.tilings.__wrapped__)
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value="GPU 1"))
    return tmp_path


def on_gpu(dtype: torch.dtype = torch.bfloat16) -> Any:
    """Stand in for a tensor on a GPU."""
    return SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), dtype=dtype)


def tunable(launch: Launch, *candidates: Tiling) -> Tunable:
    """Describe a kernel that a test makes up."""
    return Tunable("made up", [TASK], lambda _: DEFAULT, candidates, lambda _task, _device: launch)


def fake_clock(times: dict[Tiling, float]) -> Callable[[Launch], Callable[[Tiling], float]]:
    """Read the same time every time."""
    return lambda _: times.__getitem__


def test_the_fastest_is_chosen_where_it_gains_something() -> None:
    """By medians: one slow reading says nothing; a gain of less than a percent is none."""
    times = {DEFAULT: [100.0, 100.0, 100.0], FAST: [90.0, 90.0, 500.0], SLOW: [10.0, 120.0, 120.0]}
    assert fastest(times, DEFAULT) == FAST
    near = 100 * (1 - LEAST_GAIN)
    assert fastest({DEFAULT: [100.0], FAST: [near]}, DEFAULT) == DEFAULT
    assert fastest({DEFAULT: [100.0], FAST: [near - 0.1]}, DEFAULT) == FAST
    assert fastest({DEFAULT: [100.0], FAST: [50.0], TALL: [50.0]}, DEFAULT) == FAST


def test_the_default_is_always_timed_again() -> None:
    """Beside the fastest of the others, in their order."""
    times = {SLOW: [3.0], DEFAULT: [9.0], TALL: [1.0], FAST: [2.0]}
    assert survivors(times, DEFAULT, 2) == [DEFAULT, TALL, FAST]
    assert survivors(times, DEFAULT, 9) == list(times)


def test_readings_are_interleaved() -> None:
    """Each way is read once in every round, in orders that differ, and the same ones for the same seed."""
    ways, read = [DEFAULT, FAST, SLOW], []

    def timer(way: Tiling) -> float:
        read.append(way)
        return float(len(read))

    found = interleaved(ways, timer, 8)
    rounds = [tuple(read[start : start + 3]) for start in range(0, 24, 3)]
    assert all(Counter(one) == Counter(ways) for one in rounds)
    assert len(set(rounds)) > 1
    assert {way: len(times) for way, times in found.items()} == dict.fromkeys(ways, 8)
    first = list(read)
    read.clear()
    interleaved(ways, timer, 8)
    assert read == first


def test_what_is_wrong_or_does_not_run_takes_no_part() -> None:
    """However fast it is: the result of the default is what all others are held to."""

    def launch(tiling: Tiling) -> Tensor:
        if tiling == TALL:
            message = "out of shared memory\nand more words"
            raise RuntimeError(message)
        return torch.full((4,), 2.0 if tiling == WRONG else 1.0)

    times = {DEFAULT: 100.0, FAST: 80.0, SLOW: 120.0, WRONG: 1.0, TALL: 1.0}
    came = contest(tunable(launch, *times), TASK, CPU, fake_clock(times))
    one = came.configuration
    assert (one.tiling, one.time_ns, one.default_ns, one.sizes) == (FAST, 80.0, 100.0, (1024, 512))
    assert came.left_out == {TALL: "RuntimeError: out of shared memory"}
    assert set(came.wrong) == {WRONG}
    alone = contest(tunable(launch), TASK, CPU, fake_clock(times)).configuration
    assert (alone.tiling, alone.time_ns) == (DEFAULT, 100.0)


def test_a_result_may_differ_by_roundings_only() -> None:
    """Sums in another order do; NaN is infinitely far off."""
    expected = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        exact = expected.double().to(dtype)
        rounded = (exact.double() * (1 + torch.finfo(dtype).eps / 2)).to(dtype)
        assert distance(rounded, exact) <= tolerance(dtype)
        assert distance(exact * 1.05, exact) > tolerance(dtype)
    assert distance(torch.full((3,), torch.nan), torch.ones(3)) == math.inf


def test_a_shape_has_the_tiles_of_its_bucket(folder: Path) -> None:
    """Sizes up to the same powers of two share them; another type, kernel, bucket or GPU has none."""
    documents.write(table(FOUND), folder / "gpu-1.json")
    assert tuned.tuned("low rank", on_gpu(), 8192, 1024, 1024, 1) == FAST
    assert tuned.tuned("low rank", on_gpu(), 5000, 513, 1000, 1) == FAST
    assert tuned.tuned("low rank", on_gpu(), 8193, 1024, 1024, 1) is None
    assert tuned.tuned("low rank", on_gpu(), 8192, 1024, 1024, 2) is None
    assert tuned.tuned("low rank", on_gpu(torch.float16), 8192, 1024, 1024, 1) is None
    assert tuned.tuned("another", on_gpu(), 8192, 1024, 1024, 1) is None
    assert tuned.tuned("low rank", torch.zeros(1), 8192, 1024, 1024, 1) is None
    (folder / "gpu-1.json").unlink()
    assert tuned.tuned("low rank", on_gpu(), 8192, 1024, 1024, 1) is None
    assert bucket([1, 2, 3, 1024, 1025]) == (1, 2, 4, 1024, 2048)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not a table of tuned kernels"),
        (
            msgspec.json.encode(table(FOUND)).decode().replace('"rows":32', '"rows":48'),
            "rows of a tile must be",
        ),
        (TEXT.replace('"warps":8', '"warps":0'), "warps"),
        (TEXT.replace('"deep"', '"depth"'), "depth"),
        (TEXT.replace("8192", "8000"), "no powers of two"),
        (msgspec.json.encode(table(FOUND, FOUND)).decode(), "two configurations"),
        (msgspec.json.encode(table(schema=9)).decode(), "schema 9"),
    ],
    ids=["half", "tile", "warps", "field", "bucket", "twice", "version"],
)
def test_a_broken_table_is_one_error_that_names_the_file(folder: Path, content: str, words: str) -> None:
    """Where the first kernel is launched; no default hides it."""
    (folder / "gpu-1.json").write_text(content)
    with pytest.raises(UserError, match=words) as error:
        tuned.tuned("low rank", on_gpu(), 8192, 1024, 1024, 1)
    assert str(error.value).startswith(str(folder / "gpu-1.json"))
    assert "\n" not in str(error.value)


def test_every_committed_table_is_whole() -> None:
    """Each is named for its device, is part of the package, and is for kernels that there are."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        data = tomllib.load(file)["tool"]["setuptools"]["package-data"]["impls"]
    assert f"{tuned.FOLDER.relative_to(ROOT / 'impls')}/*.json" in data
    for path in tuned.FOLDER.glob("*.json"):
        found = read_table(path)
        assert tuned.path_of(found.device_name) == path
        assert {one.kernel for one in found.found} <= {one.kernel for one in TUNABLES}


def test_a_launcher_without_tiles_takes_what_was_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its own default where nothing was; tiles that it is given come first."""
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, _grid: object) -> Callable[..., None]:
            return lambda *_, **options: launched.append(options)

    monkeypatch.setattr(lowrank, "low_rank_kernel", Kernel())
    asked = Mock(return_value=Tiling(rows=32, columns=16, deep=16, group=2, warps=2, stages=2))
    x, weight, y = torch.zeros(1, 64, 1, 32), torch.zeros(48, 32), torch.zeros(1, 64, 1, 48)
    down, up = torch.zeros(64, 4, 32), torch.zeros(64, 4, 48)
    monkeypatch.setattr(lowrank, "tuned", asked)
    lowrank.low_rank_product(x, weight, down, up, 0.1, y)
    asked.assert_called_once_with("low rank", x, 64, 48, 32, 4)
    lowrank.low_rank_product(x, weight, down, up, 0.1, y, Tiling(rows=16, columns=32, deep=16, warps=1))
    monkeypatch.setattr(lowrank, "tuned", Mock(return_value=None))
    lowrank.low_rank_product(x, weight, down, up, 0.1, y)
    assert [one["num_warps"] for one in launched] == [2, 1, lowrank.tiling_of(4).warps]
    assert [one["ROWS"] for one in launched] == [32, 16, 64]


def test_what_may_be_tuned_is_described_rightly() -> None:
    """Every kernel has a name of its own, tasks that differ, and candidates for each."""
    names = [one.kernel for one in TUNABLES]
    assert len(set(names)) == len(names)
    for one in TUNABLES:
        keys = [(task.dtype, bucket(task.sizes)) for task in one.tasks]
        assert len(set(keys)) == len(keys)
        assert all(isinstance(one.default(task.sizes), Tiling) for task in one.tasks)
        assert len(one.candidates) > 1
    assert grid((16, 32), (16,), (16,), (4, 8), (2,)) == (
        Tiling(16, 16, 16, 8, 4, 2),
        Tiling(16, 16, 16, 8, 8, 2),
        Tiling(32, 16, 16, 8, 4, 2),
        Tiling(32, 16, 16, 8, 8, 2),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and tuning it takes minutes")
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    """With exit code 2, and nothing written."""
    command = [sys.executable, "-m", "impls.kernels.tuning", "--out", str(tmp_path / "table.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "tune: tuning needs a CUDA GPU, and torch sees none on this machine for 'cuda'\n"
    assert not list(tmp_path.iterdir())


def test_a_table_is_written_and_what_it_held_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels that were not asked for stay as they were; tiles that are wrong are said, with exit code 1."""
    other = msgspec.structs.replace(FOUND, kernel="another")
    documents.write(table(other, msgspec.structs.replace(FOUND, kernel="made up")), folder / "gpu-1.json")
    times = {DEFAULT: 100.0, FAST: 80.0, WRONG: 1.0}
    made_up = tunable(lambda tiling: torch.full((4,), 2.0 if tiling == WRONG else 1.0), *times)
    monkeypatch.setattr(torch.cuda, "is_available", Mock(return_value=True))
    monkeypatch.setattr(torch.cuda, "device", Mock(return_value=Mock(__enter__=Mock(), __exit__=Mock())))
    monkeypatch.setattr("impls.kernels.tuning.tunables.TUNABLES", (made_up,))
    monkeypatch.setattr("impls.kernels.tuning.clock.clock", fake_clock(times))
    assert main(["--kernels", "made*"]) == 1
    found = read_table(folder / "gpu-1.json").found
    assert [(one.kernel, one.sizes) for one in found] == [("another", FOUND.sizes), ("made up", (1024, 512))]
    assert found[1].tiling == FAST
    assert "is off by 1 of the default's norm" in capsys.readouterr().err
    assert main(["--kernels", "nothing*"]) == 2
    assert "no kernel matches 'nothing*'; there are: made up" in capsys.readouterr().err
