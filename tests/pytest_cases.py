"""Runs of pytest on third-party variants: right, wrong, cheating, raising, and unavailable."""

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from esbench import registry

LOADED = ("-p", "esbench.pytest_plugin", "--pyargs", "esbench.pytest_benchmarks")

PLUGIN = '''
"""Noise with one value for each output, right and wrong."""
from dataclasses import dataclass

import torch
from esbench.schema import Case, QUALITY
from esbench.registry import Suite, suite, variant
from esbench.workload import UnavailableError, WrongResultError, build
from impls import AbstractAdditiveScheme
from impls.perturbation.noise import Noise
from impls.benchmark.workload import PopulationWorkload

suite(Suite(
    name="tiny",
    description="two small layers",
    cases=(
        Case(operator="Linear", out_channels=4, in_channels=6, members=8),
        Case(operator="Linear", out_channels=3, in_channels=5, members=8),
    ),
    variants=("Base",),
    phases=("forward", "sample", "step", QUALITY),
))


@dataclass(frozen=True, eq=False)
class RowNoise(Noise):
    rows: torch.Tensor


class RowScheme(AbstractAdditiveScheme):
    def sample(self, weight, stream):
        return RowNoise(stream.normal("rows", *weight.shape))
    def correction(self, op, noise, x):
        return op.apply_per_member(x, noise.rows)
    def weighted_sum(self, noise, utilities):
        return torch.tensordot(utilities, noise.rows, dims=1)
    def dense_noise(self, noise):
        return noise.rows


@variant()
@dataclass(frozen=True)
class Good(RowScheme):
    """A correct scheme."""


@variant()
@dataclass(frozen=True)
class Wrong(RowScheme):
    """Its update forgets the size of utilities."""
    def weighted_sum(self, noise, utilities):
        return torch.tensordot(utilities.sign(), noise.rows, dims=1)


@variant()
@dataclass(frozen=True)
class Lying(RowScheme):
    """It is found wrong after it was timed."""


@variant()
@dataclass(frozen=True)
class Raising(RowScheme):
    """Its step raises SystemExit, which would end pytest."""


@variant()
@dataclass(frozen=True)
class Elsewhere(RowScheme):
    """It is unavailable here."""


class Late(PopulationWorkload):
    def confirm(self, phase):
        raise WrongResultError("a shortcut was taken")


class Ending(PopulationWorkload):
    calls = 0
    def _step(self):
        self.calls += 1
        if self.calls > 3:
            raise SystemExit(7)
        return super()._step()


@build.register(Lying)
def _(scheme, case, device, seed):
    return Late(scheme, case, device, seed)


@build.register(Raising)
def _(scheme, case, device, seed):
    return Ending(scheme, case, device, seed)


@build.register(Elsewhere)
def _(scheme, case, device, seed):
    raise UnavailableError("it needs an abacus")
'''


@dataclass(frozen=True)
class PytestResult:
    """The result of pytest: its exit code, its output, and the stored benchmarks."""

    code: int
    printed: str
    stored: dict[str, Any]

    @property
    def timed(self) -> list[tuple[str, str]]:
        """The variant and phase of each stored benchmark."""
        every = [benchmark["params"] for benchmark in self.stored["benchmarks"]]
        return [(params["variant"], params["phase"]) for params in every]

    def outcomes(self, outcome: str) -> str:
        """Return the lines of the summary with this outcome."""
        return "\n".join(line for line in self.printed.splitlines() if line.startswith(outcome))


def run_pytest(folder: Path, *options: str) -> PytestResult:
    """Run pytest in this process, from the folder of a third-party plug-in."""
    (folder / "my_rows.py").write_text(PLUGIN)
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setenv("COLUMNS", "200")
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)  # pytest-benchmark times nothing in a worker
        patch.setattr(registry, "LOADED", dict(registry.LOADED))
        patch.delitem(sys.modules, "my_rows", raising=False)  # of an earlier run
        arguments = ["-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", "-rA"]
        code = pytest.main([*arguments, *LOADED, *options])
    file = folder / "stored.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return PytestResult(int(code), printed.getvalue(), stored)
