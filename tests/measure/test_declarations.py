"""Declarations of a plug-in's workloads and variants: an error costs its own rows, never the run."""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esbench.measure import runner
from esbench.registry import Entry, Registry
from esbench.schema import Case, Phase, Run, Scalar, Work
from esbench.workload import QualityMetric, build
from tests.fakes import FakeScheme, FakeWorkload, World
from tests.loop_cases import plan_of, run_into

TIMED: tuple[Phase, ...] = ("sample", "forward", "step")
PHASES: tuple[Phase, ...] = ("sample", "forward", "update", "step", "quality")
DECLARED, IN_ONE_RUN = 200, 20


class Text(str):
    """A text that is not of type str."""

    __slots__ = ()


class Broken:
    """An object that has neither a number nor a text."""

    def __float__(self) -> float:
        raise ArithmeticError

    def __repr__(self) -> str:
        raise ArithmeticError


NUMBERS: Sequence[Any] = (
    *(0, 1, -1, 2**63, 2**64, -(2**63), 10**400, math.nan, math.inf, -math.inf, 1e300, 1e24, -0.0),
    *(True, None, "7", b"x", [1], {}, 1 + 2j, int, object(), Broken(), np.float32(3), np.int64(3)),
    *(np.float64("nan"), torch.tensor(3.0), torch.tensor([1.0, 2.0]), "\ud800"),
)
TEXTS: Sequence[Any] = (
    *("kappa", "latency_ns", "", "x" * 10**5, "\ud800", "two\nlines", "\0", "=1+1"),
    *(None, 3, b"x", Text("x"), Broken(), []),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Declaring(FakeScheme):
    """A fake variant whose workload declares random things, different ones for each seed."""

    seed: int = 0


class DeclaringWorkload(FakeWorkload):
    """A workload in which one of the declared things is random."""

    def __init__(self, scheme: Declaring, case: Case) -> None:
        super().__init__(scheme, case)
        self._rng = random.Random(scheme.seed)  # noqa: S311  # a choice, not a secret
        self._random = ("work", "noise_bytes", "unavailable", "phases", "inputs", "quality")[scheme.seed % 6]

    def work(self, phase: Phase) -> Any:
        """Return values that are not numbers, or raise."""
        if self._random != "work":
            return super().work(phase)
        if self._rng.random() < 1 / 4:
            raise self._rng.choice([ValueError("x"), SystemExit(3), MemoryError(), RuntimeError(Broken())])
        flops, moved, output = (self._rng.choice([1.0, *NUMBERS]) for _ in range(3))
        return self._rng.choice([flops, Work(flops=flops, moved_bytes=moved, output_bytes=output)])

    @property
    def noise_bytes(self) -> Any:
        """Return a value that is not a number."""
        return self._rng.choice(NUMBERS) if self._random == "noise_bytes" else super().noise_bytes

    @property
    def unavailable(self) -> Any:
        """Return reasons that are not texts."""
        if self._random != "unavailable":
            return super().unavailable
        return self._rng.choice([None, [], {}, *({"update": text} for text in (*TEXTS, *NUMBERS))])

    @property
    def phases(self) -> Any:
        """Return values that are not callable, and phases that do not exist."""
        calls: Mapping[Any, Callable[[], object]] = super().phases
        if self._random != "phases":
            return calls
        named = [{**calls, text: print} for text in TEXTS if text.__hash__]
        return self._rng.choice([None, [], 3, {"forward": None}, {"sample": 3}, *named])

    @property
    def inputs(self) -> Any:
        """Return inputs that are no tensors."""
        others = (None, 3, [3], [None], [torch.full((1,), math.nan)] * 2, [torch.tensor(2**62)], [Broken()])
        return self._rng.choice(others) if self._random == "inputs" else self._buffers

    @inputs.setter
    def inputs(self, value: object) -> None:
        """Keep the inputs of the fake."""
        self._buffers = value

    def quality(self) -> Any:
        """Return metrics with random names and samples, among them one twice."""
        if self._random != "quality":
            return [QualityMetric("kappa", "fit", (1.0, 2.0))]
        pick = self._rng.choice
        samples = [(1.0, 2.0), (pick(NUMBERS),), (1.0, pick(NUMBERS)), pick(NUMBERS), np.ones(2)]
        metrics = [
            QualityMetric(pick(("kappa", *TEXTS)), pick(("fit", *TEXTS)), pick(samples), pick(("", *TEXTS)))
            for _ in range(pick((1, 2, 3)))
        ]
        return pick([*metrics[:1], metrics, metrics * 2, iter(metrics)])


@build.register
def _(scheme: Declaring, case: Case, device: str, seed: int) -> Any:  # noqa: ARG001  # the signature of build
    return DeclaringWorkload(scheme, case)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no peaks, and do not wait for late results."""
    monkeypatch.setattr(runner, "device_peaks", lambda *_: [])
    monkeypatch.setattr(time, "sleep", lambda _: None)


def measure(folder: Path, world: World, *entries: Entry | FakeScheme) -> Run:
    """Measure variants in all phases; return what was stored."""
    return run_into(folder, plan_of(*entries, phases=PHASES, cell_s=0.05), world.tools)[1]


def test_random_declarations_cost_their_own_rows(tmp_path: Path) -> None:
    """Each variant has a row in each phase or one reason for all, and the variant beside them all times."""
    failed = 0
    for first in range(0, DECLARED, IN_ONE_RUN):
        world = World(room_bytes=10**6)
        schemes = [
            Declaring(f"Random{seed}", world, phases=TIMED, seed=seed)
            for seed in range(first, first + IN_ONE_RUN)
        ]
        right = FakeScheme("Right", world, phases=TIMED)
        run = measure(tmp_path / str(first), world, *(scheme for scheme in (*schemes, right)))
        timed = {row.phase for row in run.measurements if row.variant.scheme == "Right"}
        assert timed == {*TIMED}
        for scheme in schemes:
            rows = [row for row in run.rows if row.variant.scheme == scheme.name]
            assert {row.phase for row in rows} in ({None}, {*PHASES}), scheme
        failed += len({row.variant for row in run.skipped if row.status == "failed"})
    assert failed > DECLARED / 3


def test_a_reason_names_the_wrong_declaration(tmp_path: Path) -> None:
    """The reason has the field, or the metric that is given twice; times go with wrong work."""

    class Wrong(DeclaringWorkload):
        def work(self, phase: Phase) -> Any:
            return Work(flops=math.nan, moved_bytes=1.0, output_bytes=1.0) if phase == "step" else None

        def quality(self) -> Iterator[QualityMetric]:
            yield from [QualityMetric("kappa", "fit", (1.0,))] * 2

    class WrongScheme(Declaring):
        """A scheme with that workload."""

    build.register(WrongScheme, lambda scheme, case, *_: Wrong(scheme, case))
    world = World()
    run = measure(tmp_path, world, WrongScheme("A", world, phases=TIMED))
    reasons = {row.phase: row.reason for row in run.skipped if row.status == "failed"}
    assert reasons.keys() == {"step", "quality"}
    assert "cannot store this record" in reasons["step"]
    assert "`$.work.flops`" in reasons["step"]
    assert reasons["quality"] == "ValueError: its method quality returns the metric kappa by fit twice"
    assert {row.phase for row in run.measurements} == {"sample", "forward"}


@dataclasses.dataclass(frozen=True)
class Optioned:
    """A scheme with one option of any type."""

    option: Any = None


def test_an_option_of_any_type_becomes_a_label(tmp_path: Path) -> None:
    """Texts, bools and numbers are stored as they are, anything else as its text."""
    cases: Sequence[tuple[object, Scalar]] = (
        (0.5, 0.5),
        (True, True),
        (2**63, 2**63),
        ("x", "x"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        ([1, "a"], "[1, 'a']"),
        (torch.float16, "torch.float16"),
        (np.float64(0.5), "0.5"),
        ("\ud800", "?"),
    )
    for number, (option, stored) in enumerate(cases):
        registry, source = Registry(), ("two\nlines", 5)[number % 2]
        registry.variant(option=option, source=source)(Optioned)  # type: ignore[arg-type]  # on purpose
        (entry,) = registry.entries.values()
        assert entry.variant.options == (("option", stored),)
        run = measure(tmp_path / str(number), World(), entry)
        assert [row.variant for row in run.skipped] == [entry.variant]


def test_a_declaration_that_changes_a_setting_costs_its_own_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variant that is read after the declaration is not blamed."""

    def work(self: FakeWorkload, _: Phase) -> None:
        if self.scheme.name == "Wrong":
            torch.set_default_dtype(torch.float64)

    monkeypatch.setattr(FakeWorkload, "work", work)
    world = World()
    entries = [FakeScheme(name, world).entry() for name in ("Right", "Wrong")]
    run = measure(tmp_path, world, *entries)
    reasons = {row.variant.scheme: row.reason for row in run.skipped if row.phase == "forward"}
    assert list(reasons) == ["Wrong"]
    assert "the default dtype from torch.float32 to torch.float64" in reasons["Wrong"]
    assert {row.variant.scheme for row in run.measurements if row.metric == "latency_ns"} == {"Right"}
    assert torch.get_default_dtype() is torch.float32
