"""CUDA graphs of phases that draw noise: each replay draws the noise of the next step."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import impls
from esbench.measure import validation
from esbench.measure.cuda import Streak
from esbench.measure.timers import CudaClock
from esbench.schema import PHASES, Case, Phase
from esbench.workload import UnavailableError, WrongResultError, build
from impls import Population, perturb
from impls.benchmark.workload import PopulationWorkload
from impls.perturbation.scheme import AnyScheme
from tests.fake_cuda_tensors import fake_cuda


class AbstractCounted:
    """A scheme that requires the stream ``philox``, like the schemes that draw inside a kernel."""

    @property
    def stream(self) -> str:
        """Return the name of the noise stream."""
        return "philox"


@dataclass(frozen=True)
class Counted(AbstractCounted, impls.Perturbed):
    """A scheme that stores its noise."""


@dataclass(frozen=True)
class CountedAgain(AbstractCounted, impls.RegeneratedSign):
    """A scheme that draws its noise again wherever it is read."""


@dataclass(frozen=True)
class CountedThin(AbstractCounted, impls.LowRank):
    """A low-rank scheme that stores its factors."""


COUNTED: tuple[AnyScheme, ...] = (Counted(), CountedAgain(), CountedThin(2))
CASE = Case(operator="Linear", out_channels=5, in_channels=6, bias=True, members=8, repeats=2)


@contextmanager
def measured(scheme: AnyScheme, phase: Phase) -> Iterator[tuple[PopulationWorkload, CudaClock]]:
    """Set a workload up on the fake device and enter a phase."""
    device: Any
    with fake_cuda() as device:
        workload = build(scheme, CASE, "cuda", 0)
        assert isinstance(workload, PopulationWorkload)
        workload.enter(phase)
        yield workload, CudaClock("graph", device, Streak())


def population(scheme: AnyScheme, seed: int = 3) -> Population:
    """Return a population that draws from the stream ``philox``."""
    return perturb(nn.Linear(6, 5), scheme, members=4, sigma=0.1, seed=seed, stream="philox")


def drawn(population: Population, step: int | Tensor) -> list[Tensor]:
    """Draw a step's noise and write it out."""
    return list(population.dense_noise(population.sample(step)).values())


def alike(first: validation.Fingerprints, second: validation.Fingerprints, share: float) -> bool:
    """Return whether two results differ by at most a given share of their norms."""
    return all(a.is_close(b, share) for a, b in zip(first, second, strict=True))


def test_a_step_in_a_tensor_draws_the_same_noise_as_an_int(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is bitwise equal for an int and a tensor, and does not change when the tensor advances."""
    for scheme in COUNTED:
        for seed, step in itertools.product((0, 2**80), (0, 9, 10, 123456789, 2**63 - 1)):
            perturbed = population(scheme, seed)
            for values, expected in zip(
                drawn(perturbed, torch.tensor(step)), drawn(perturbed, step), strict=True
            ):
                assert torch.equal(values, expected), (scheme, seed, step)
        perturbed, number = population(scheme), torch.tensor(4)
        noise = perturbed.sample(number)
        number.add_(1)
        for values, expected in zip(perturbed.dense_noise(noise).values(), drawn(perturbed, 4), strict=True):
            assert torch.equal(values, expected), scheme
    # With an int the keys stay on the host: making them on the device would cost time at every call.
    monkeypatch.setattr("impls.perturbation.philox.device_keys", None)
    drawn(population(impls.Perturbed()), 0)


def test_replays_equal_calls_at_the_same_steps() -> None:
    """With the stream ``philox``, a captured graph of any phase passes the check of replays."""
    for scheme, phase in itertools.product(COUNTED, PHASES):
        with measured(scheme, phase) as (workload, clock):
            call = workload.phases[phase]
            replay = clock.prepare(call, max(1, len(workload.inputs)))
            validation.check_replay(workload, phase, replay)
            if phase in validation.DRAWING_PHASES:
                workload.enter(phase)
                called = [validation.fingerprints(call()) for _ in range(4)]
                workload.enter(phase)
                replayed = [validation.fingerprints(replay()) for _ in range(4)]
                # The optimizer has changed the weights a little.
                assert all(alike(*pair, 1e-4) for pair in zip(replayed, called, strict=True))
                assert not any(alike(*pair, 1e-2) for pair in itertools.pairwise(replayed))


def test_a_capture_that_freezes_its_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counted by the host is a constant in the graph, so every replay would draw the same noise."""
    phases: tuple[Phase, ...] = ("sample", "step")
    for phase in phases:
        with measured(Counted(), phase) as (workload, clock), monkeypatch.context() as patch:
            patch.setattr(workload, "_step_number", 0)
            patch.setattr(torch.cuda, "is_current_stream_capturing", bool)
            replay = clock.prepare(workload.phases[phase], max(1, len(workload.inputs)))
            with pytest.raises(WrongResultError, match=f"{phase} replayed .* draws the same noise"):
                validation.check_replay(workload, phase, replay)


def test_the_stream_block_is_captured_only_in_phases_that_do_not_draw() -> None:
    """Stored noise is read in place; in other phases the error has the reason and the remedy."""
    frozen = r"graph capture failed: every replay .* the noise of step \d: use stream='philox'"
    seeded = "graph capture failed: a CUDA graph cannot capture noise of the stream 'block'"
    cases: list[tuple[AnyScheme, Phase, str]] = [
        (impls.Perturbed(), "sample", frozen),
        (impls.Perturbed(), "step", frozen),
        (impls.Perturbed(), "forward", ""),
        (impls.Perturbed(), "update", ""),
        (impls.Regenerated(), "forward", seeded),  # draws again, with generators seeded by the host
    ]
    for scheme, phase, message in cases:
        with measured(scheme, phase) as (workload, clock):
            call, turns = workload.phases[phase], max(1, len(workload.inputs))
            if message:
                with pytest.raises(UnavailableError, match=message):
                    clock.prepare(call, turns)
            else:
                validation.check_replay(workload, phase, clock.prepare(call, turns))


def test_a_step_on_the_device_is_refused_where_it_cannot_be_used() -> None:
    """A wrong dtype or shape, generators seeded by the host and blocks drawn by the host are refused."""
    for step in (torch.tensor([0]), torch.tensor(0.0), torch.tensor(0, dtype=torch.int32)):
        with pytest.raises(ValueError, match="must be 0-d, int64 and on cpu"):
            population(Counted()).sample(step)
    with fake_cuda():
        step = torch.zeros((), dtype=torch.int64, device="cuda")
        model = nn.Linear(8, 8).to("cuda")
        with pytest.raises(ValueError, match="pass the step as an int, or use stream='philox'"):
            perturb(model, impls.Perturbed(), members=4, sigma=0.1).sample(step)
        blocks = perturb(model, impls.DropoutBlocks(), members=4, sigma=0.1, stream="philox")
        with pytest.raises(ValueError, match="pass the step as an int"):
            blocks.sample(step)
