"""The pytest-benchmark plugin: variants are checked, then timed, and reported in pytest's terms."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from esbench import pytest_benchmarks, pytest_plugin
from esbench.errors import UserError
from esbench.measure.case_runner import PreparedVariant
from esbench.measure.failure import Failure
from esbench.measure.instruments import do_nothing
from esbench.measure.validation import ExactChecks, TorchState
from esbench.pytest_plugin import Call, Cell, Choice, ChosenBenchmarks, Subject
from esbench.schema import Phase
from tests.fakes import CASE, FakeScheme, World
from tests.pytest_cases import run_pytest

QUICKLY = ("--benchmark-max-time", "0.01", "--benchmark-json", "stored.json")
TINY = ("--esbench-plugin", "my_rows.py", "--esbench-suite", "tiny", "--esbench-device", "cpu", *QUICKLY)


def test_a_suite_is_benchmarked_and_wrong_variants_have_no_time(tmp_path: Path) -> None:
    """The suite's and the plugin's variants are timed on every case, in every phase that they have.

    A group is a case and a phase, so that it compares variants of the same computation. Times come with peak
    and noise in bytes, kappa and n_eff. Tests of a wrong variant fail with the reason and store no time, even
    if it is found wrong after timing.
    """
    ended = run_pytest(tmp_path, *TINY)
    assert ended.code == 1
    assert ended.timed.count(("GoodLinear", "forward")) == 2
    assert {phase for variant, phase in ended.timed if variant == "GoodLinear"} == {
        "forward",
        "sample",
        "step",
    }
    assert ("Base", "forward") in ended.timed
    assert not [variant for variant, _ in ended.timed if variant.startswith("Flipped")]
    groups = {stored["group"] for stored in ended.stored["benchmarks"]}
    assert len(groups) == 6
    assert "benchmark 'Linear(4, 6) members=8, forward': 3 tests" in ended.printed
    assert ended.stored["esbench"]["torch"] == str(torch.__version__)
    assert "esbench" not in ended.stored["machine_info"]  # pytest-benchmark compares machine_info
    extra = {
        (stored["params"]["variant"], stored["params"]["phase"]): stored["extra_info"]
        for stored in ended.stored["benchmarks"]
        if stored["params"]["case"].startswith("Linear(4, 6)")
    }
    good = extra["GoodLinear", "sample"]
    assert good["noise_bytes"] == 8 * 4 * 6 * 4
    assert good["peak_bytes"] >= good["noise_bytes"]
    assert (good["device"], good["suite"]) == ("cpu", "tiny")
    assert isinstance(good["kappa"], float)
    assert "n_eff" in good or "n_eff_at_least" in good
    base = extra["Base", "forward"]
    assert base["noise_bytes"] == 0
    assert "kappa" not in base
    assert base["quality"]
    failed = ended.outcomes("FAILED")
    for variant, words in (
        ("WrongLinear", "wrong result: update of"),
        ("LyingLinear", "wrong result: a shortcut was taken; found after timing"),
    ):
        assert failed.count(variant) == 6
        assert words in failed
        assert not [name for name, _ in ended.timed if name == variant]
        assert not [line for line in ended.printed.splitlines() if line.startswith(f"test_variant[{variant}")]
    assert failed.count("RaisingLinear") == 2  # in the phases in which it raises; the others are timed
    assert "SystemExit: 7" in failed
    assert {phase for variant, phase in ended.timed if variant == "RaisingLinear"} == {"forward", "sample"}
    skipped = ended.outcomes("SKIPPED")  # has a reason that is not a failure
    assert "[6]" in next(line for line in skipped.splitlines() if "it needs an abacus" in line)
    assert "a plain layer draws no noise" in skipped


def test_without_times_variants_are_checked(tmp_path: Path) -> None:
    """With --benchmark-disable, as under pytest-xdist, every test still reports a wrong variant."""
    named = ("--esbench-variants", "Good", "--esbench-variants", "Wrong", "--esbench-cases", "Linear(4*")
    ended = run_pytest(tmp_path, *TINY, *named, "--benchmark-disable")
    assert ended.code == 1
    assert ended.outcomes("FAILED").count("WrongLinear") == 3
    assert ended.outcomes("PASSED").count("GoodLinear") == 3
    assert not ended.stored


def test_an_invalid_option_is_one_line() -> None:
    """Invalid options end the run before any timing, with one line that says what to do instead."""
    with pytest.raises(
        pytest.Collector.CollectError, match="the plug-in is not loaded: run pytest -p esbench"
    ):
        pytest_benchmarks.pytest_generate_tests(Mock(config=Mock(stash={})))
    session = Mock()
    choice: dict[str, object] = {"variants": [], "plugin": [], "suite": "nope", "device": "cpu"}
    choice |= {"cases": "*", "phases": "", "seed": 0}
    session.config.getoption = {f"esbench_{name}": value for name, value in choice.items()}.__getitem__
    with pytest.raises(pytest.UsageError, match="no suite 'nope'"):
        pytest_plugin.pytest_sessionstart(session)
    session.config.pluginmanager.hasplugin.return_value = False
    with pytest.raises(pytest.UsageError, match="needs pytest-benchmark: pip install"):
        pytest_plugin.pytest_sessionstart(session)


def test_a_choice_without_cells_is_refused() -> None:
    """The error says why; an unknown name is an error as in every command."""
    for choice, words in (
        (Choice(device="cpu", variants=("Nope*",)), r"no variant matches 'Nope\*'"),
        (Choice(device="cpu", phases="quality"), "nothing to benchmark"),
        (Choice(device="cpu", variants=("Binary",), suite="quick"), "nothing to benchmark"),
    ):
        with pytest.raises(UserError, match=words):
            ChosenBenchmarks.of(choice)


def test_every_variant_is_a_benchmark_by_default() -> None:
    """On a CPU the default is suite quick with every variant registered for its cases, base and naive too.

    Every option that its page in docs names is one of the plug-in.
    """
    benchmarks = ChosenBenchmarks.of(Choice(device="cpu"))
    assert benchmarks.suite == "quick"
    assert {"Base", "Naive", "PermutedLinear", "PermutedConv2d"} <= {
        cell.variant for cell in benchmarks.cells
    }
    assert {cell.phase for cell in benchmarks.cells} == {"sample", "forward", "update", "step"}
    assert benchmarks.with_quality
    assert not ChosenBenchmarks.of(Choice(device="cpu", phases="forward")).with_quality
    page = (Path(__file__).parents[2] / "docs/pytest.md").read_text(encoding="utf-8")
    named = set(re.findall(r"--esbench-\w+", page))
    known = set(re.findall(r'"(--esbench-\w+)"', Path(pytest_plugin.__file__).read_text(encoding="utf-8")))
    assert set() < named <= known


def chosen(
    scheme: FakeScheme, device: str = "cpu", phases: tuple[Phase, ...] = ("sample", "forward")
) -> ChosenBenchmarks:
    """Return the plugin's front benchmarks with a fake variant on one case."""
    cells = {Cell(scheme.name, "case", phase): Subject(scheme.entry(), CASE) for phase in phases}
    return ChosenBenchmarks(
        device, "fakes", 0, cells, ExactChecks((), "cpu", 0), with_quality=False, torch_state=TorchState()
    )


def test_every_timed_call_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA each timed call includes a synchronization; on a CPU nothing is added."""
    assert chosen(FakeScheme("A", World()), "cuda").synchronize is torch.cuda.synchronize
    world = World()
    for wait, expected in (
        (lambda: world.log.append("waited"), ["A", "waited"] * 3),
        (do_nothing, ["A"] * 3),
    ):
        monkeypatch.setattr(ChosenBenchmarks, "synchronize", property(Mock(return_value=wait)))
        benchmarks = chosen(FakeScheme("A", world))
        prepared = benchmarks.prepare(Cell("A", "case", "forward"))
        assert isinstance(prepared, PreparedVariant)
        call = benchmarks.call(prepared, "forward")
        world.log.clear()
        for _ in range(3):
            call()
        assert world.log == expected


def test_every_timed_call_reads_new_inputs() -> None:
    """Inputs are renewed before each call outside of its time; the calls fill pytest-benchmark's time."""
    world, buffers, inputs_read = World(), (torch.randn(8), torch.randn(8)), list[tuple[float, ...]]()

    def act(_: Phase, __: int, turn: int) -> torch.Tensor:
        time.sleep(0.001)
        inputs_read.append(tuple(buffers[(turn - 1) % 2].tolist()))
        return torch.full((2,), float(turn))

    def pedantic(target: Call, *, setup: Callable[[], None], rounds: int) -> None:
        inputs_read.clear()
        for _ in range(rounds):
            setup()
            target()

    benchmarks = chosen(FakeScheme("A", world, inputs=buffers, act=act), phases=("forward",))
    options = {"benchmark_max_time": 0.03, "benchmark_min_rounds": 5}
    failure = pytest_benchmarks._time(  # noqa: SLF001  # without a session of pytest
        Mock(enabled=True, pedantic=pedantic, extra_info={}),
        benchmarks,
        Cell("A", "case", "forward"),
        Mock(getoption=options.__getitem__),
    )
    assert failure is None
    timed = inputs_read[:-3]  # those after the footprint and the check after timing read what is there
    assert 5 <= len(timed) <= 30
    assert len(set(timed)) == len(timed)


def test_one_variant_is_resident_at_a_time() -> None:
    """A variant stays set up for its next phase, and is freed before another variant is set up."""
    world = World(room_bytes=10)
    names = ("A", "B")
    schemes = {name: FakeScheme(name, world) for name in names}
    benchmarks = chosen(schemes["A"])
    benchmarks.cells = {
        Cell(name, "case", phase): Subject(schemes[name].entry(), CASE)
        for name in names
        for phase in ("sample", "forward")
    }
    numbers = []
    for cell in benchmarks.cells:
        assert isinstance(benchmarks.prepare(cell), PreparedVariant)
        (resident,) = world.resident
        numbers.append((resident.scheme.name, resident.calls))
        del resident
    assert numbers == [("A", 2), ("A", 4), ("B", 2), ("B", 4)]
    benchmarks.close()
    assert not world.resident


def test_a_phase_without_a_time_has_its_reason() -> None:
    """A variant that failed its check has no time in later phases; a missing phase is not a failure."""

    def act(phase: Phase, _: int, turn: int) -> object:
        return torch.full((2,), float("nan") if phase == "sample" else float(turn))

    for benchmarks, reasons in (
        (
            chosen(FakeScheme("A", World(), act=act)),
            [Failure("failed", "wrong result: sample gives values that are not finite")] * 2,
        ),
        (
            chosen(FakeScheme("A", World()), phases=("update", "step")),
            [Failure("unavailable", "it learns nothing"), Failure("unavailable", "it has no phase step")],
        ),
    ):
        assert [benchmarks.prepare(cell) for cell in benchmarks.cells] == reasons
