"""A pytest plug-in that runs the variants under pytest-benchmark, with the options of ``esbench run``.

The tests are in :mod:`esbench.pytest_benchmarks`:

    pytest -p esbench.pytest_plugin --pyargs esbench.pytest_benchmarks --esbench-phases forward
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, Self

import msgspec
import pytest
import torch

from esbench.errors import UserError
from esbench.measure import memory, validation
from esbench.measure.case_runner import CoResidentGroup, PreparedVariant, quality_rows
from esbench.measure.environment import environment, resolve_device
from esbench.measure.failure import Failure, classify
from esbench.measure.float32_precision import precision, unsupported_reason
from esbench.measure.instruments import do_nothing
from esbench.measure.validation import ExactChecks, TorchState
from esbench.registry import REGISTRY, Entry, cases_of, entries_of_suite, load, load_installed, parse_phases
from esbench.report.analysis.quality import Qualities
from esbench.schema import (
    QUALITY,
    SCHEMA_VERSION,
    Case,
    Environment,
    Measurement,
    Phase,
    Run,
    RunHeader,
    Skipped,
)
from esbench.workload import WrongResultError

NEEDS = "esbench.pytest_plugin needs pytest-benchmark: pip install 'pytest-benchmark[histogram]'"

Call = Callable[[], object]


class Choice(NamedTuple):
    """The options, each with the name of that of `esbench run`."""

    suite: str | None = None
    device: str = "auto"
    variants: Sequence[str] = ()
    cases: str = "*"
    phases: str = ""
    plugin: Sequence[str] = ()
    seed: int = 0


class Cell(NamedTuple):
    """A benchmark: the parts of the name of its test."""

    variant: str
    case: str
    phase: Phase


class Subject(NamedTuple):
    """The variant and the case of a cell."""

    entry: Entry
    case: Case


@dataclass
class ChosenBenchmarks:
    """The benchmarks of a session. The last variant stays set up for its next phase."""

    device: str
    suite: str
    seed: int
    cells: Mapping[Cell, Subject]
    checks: ExactChecks
    with_quality: bool
    torch_state: TorchState
    _subject: Subject | None = None
    _group: CoResidentGroup | None = None
    _quality: dict[str, object] | None = None

    @classmethod
    def of(cls, choice: Choice) -> Self:
        """Choose benchmarks by name.

        Raises:
            UserError: a name is unknown, or there is nothing to time.
        """
        torch_state = TorchState()  # before a plug-in is loaded
        device = resolve_device(choice.device)
        load_installed()
        packages = {load(name) for name in choice.plugin}
        suite = REGISTRY.find_suite(choice.suite or ("readme" if device == "cuda" else "quick"))
        entries = REGISTRY.select(choice.variants or ["*"])
        if not choice.variants:
            entries = entries_of_suite(entries, suite, packages)
        phases = parse_phases(choice.phases) or suite.phases
        cells = {
            Cell(entry.variant.label(case.operator), case.label, phase): Subject(entry, case)
            for case in cases_of(suite, choice.cases, None)
            for entry in entries
            if entry.supports(case)
            for phase in phases
            if phase != QUALITY
        }
        if not cells:
            raise UserError(
                "nothing to benchmark: no chosen variant supports the cases, or only quality was chosen"
            )
        try:
            torch_state.check()
        except WrongResultError as error:
            raise UserError(f"cannot measure with the loaded variants: {error}") from error
        checks = ExactChecks(REGISTRY.check_cases, device, choice.seed)
        return cls(device, suite.name, choice.seed, cells, checks, QUALITY in phases, torch_state)

    @cached_property
    def environment(self) -> Environment:
        """The machine and software."""
        return environment(self.device)

    @property
    def synchronize(self) -> Call:
        """The function that waits for the device; on a CPU it does nothing."""
        return torch.cuda.synchronize if self.device == "cuda" else do_nothing

    @contextlib.contextmanager
    def conditions(self, cell: Cell) -> Iterator[None]:
        """Set the precision of a cell, and on a CPU a memory limit, so that a full machine is an error."""
        with (
            precision(self.cells[cell].case.dtype),
            memory.limit_memory() if self.device == "cpu" else contextlib.nullcontext(),
        ):
            yield

    def prepare(self, cell: Cell) -> PreparedVariant | Failure:
        """Set a variant up, check it and enter the phase; or return the reason why it cannot be timed."""
        subject, phase = self.cells[cell], cell.phase
        if reason := unsupported_reason(subject.case.dtype, self.device):
            return Failure("unavailable", reason)
        if self._group is None or self._subject != subject:
            self.close()
            self._subject = subject
            self._group = CoResidentGroup(
                subject.case, self.device, self.seed, self.synchronize, self.torch_state
            )
            self._group.admit(subject.entry, self.checks)
        group = self._group
        for prepared in group.variants:  # empty if the variant failed its set-up
            if phase in prepared.unavailable:
                return Failure("unavailable", prepared.unavailable[phase])
        group.precheck(phase)
        if group.failures:
            return group.failures[0][1]
        (prepared,) = group.variants
        prepared.workload.enter(phase)
        return prepared

    def call(self, prepared: PreparedVariant, phase: Phase) -> Call:
        """Return the timed function: the call of a phase, then the wait for the device."""
        call, synchronize = prepared.workload.phases[phase], self.synchronize
        if synchronize is do_nothing:
            return call

        def call_and_wait() -> object:
            result = call()
            synchronize()
            return result

        return call_and_wait

    def confirm(self, prepared: PreparedVariant, phase: Phase) -> dict[str, object]:
        """Compare a timed call with the reference implementation again; return its memory.

        Raises:
            WrongResultError: the results differ.
        """
        footprint = memory.footprint(prepared.workload.phases[phase], self.device)
        validation.check_memory(footprint, phase)
        validation.postcheck(prepared.workload, phase, prepared.fingerprints[phase])
        self.torch_state.check()
        return {"peak_bytes": footprint.peak_bytes, "noise_bytes": prepared.workload.noise_bytes}

    def quality(self, prepared: PreparedVariant) -> dict[str, object]:
        """Return kappa and n_eff of the variant, or the reason for not having them."""
        if self._quality is None:
            try:
                self._quality = self._compute_quality(prepared) if self.with_quality else {}
            except BaseException as error:  # noqa: BLE001  # a variant may raise anything
                self._quality = {"quality": classify(error).reason}
        return self._quality

    def close(self) -> None:
        """Free the workload that is set up."""
        if self._group is not None:
            self._group.free()
        self._group = self._quality = None

    def _compute_quality(self, prepared: PreparedVariant) -> dict[str, object]:
        """Return kappa and n_eff, computed like those of a run in a report."""
        assert self._subject is not None  # noqa: S101  # the variant is set up
        variant, case = prepared.entry.variant, self._subject.case
        rows = quality_rows(
            prepared.workload, partial(Measurement, variant=variant, case=case, phase=QUALITY)
        )
        header = RunHeader(
            schema=SCHEMA_VERSION,
            run_id="",
            suite=self.suite,
            started="",
            seed=self.seed,
            environment=self.environment,
        )
        kappa, effective = Qualities(Run(header=header, rows=tuple(rows))).law(variant, case)
        metrics: dict[str, object] = {"kappa": kappa.mean} if kappa else {}
        if isinstance(effective, Skipped):
            metrics["quality"] = effective.reason
        elif effective is not None:
            name = "n_eff_at_least" if effective.is_bound else "n_eff"
            metrics[name] = "exact" if effective.is_exact else effective.value
        return metrics


CHOSEN: pytest.StashKey[ChosenBenchmarks] = pytest.StashKey()
"""Key of the chosen benchmarks in the configuration of pytest."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `esbench run`, each with the prefix ``--esbench``."""
    group = parser.getgroup("esbench", "variants of esbench, as benchmarks")
    add, add_list = group.addoption, partial(group.addoption, action="append", default=[])
    add("--esbench-suite", metavar="NAME", help="Suite; by default readme on a GPU and quick on a CPU.")
    add("--esbench-device", metavar="NAME", default="auto", help="auto, cpu or cuda.")
    text = "Glob over names (Permuted*) or labels (PermutedLinear*); repeatable."
    add_list("--esbench-variants", metavar="GLOB", help=text)
    add("--esbench-cases", metavar="GLOB", default="*", help="Glob over case labels, such as 'Linear*'.")
    text = "Comma-separated: sample, forward, update, step; quality adds kappa and n_eff."
    add("--esbench-phases", metavar="NAMES", default="", help=text)
    text = "Module, or file ending in .py, that registers variants; repeatable."
    add_list("--esbench-plugin", metavar="NAME", help=text)
    text = "Seed of weights, inputs and noise."
    add("--esbench-seed", metavar="NUMBER", type=int, default=0, help=text)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Choose the cells to benchmark, before tests are collected.

    Raises:
        pytest.UsageError: pytest-benchmark is not installed, or a name is unknown.
    """
    config = session.config
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(NEEDS)
    choice = Choice(*(config.getoption(f"esbench_{name}") for name in Choice._fields))
    try:
        config.stash[CHOSEN] = ChosenBenchmarks.of(choice)
    except UserError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, object]) -> None:
    """Add the environment of a run, with the GPU, to the JSON of pytest-benchmark.

    It is not part of ``machine_info``, which pytest-benchmark compares between runs.
    """
    if CHOSEN in config.stash:
        output_json["esbench"] = msgspec.to_builtins(config.stash[CHOSEN].environment)
