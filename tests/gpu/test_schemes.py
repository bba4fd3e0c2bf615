"""Every variant on a CUDA GPU, checked against the same reference as on the CPU."""

from typing import Any

import pytest
import torch
from torch import nn

import impls
from esbench.measure import validation
from esbench.measure.cuda import Cuda, Streak
from esbench.measure.float32_precision import precision
from esbench.measure.timers import CudaClock
from esbench.registry import Entry, load
from esbench.schema import Case
from esbench.workload import build
from impls.perturbation.layer import PerturbedLayer
from impls.perturbation.noise import NoiseStream
from tests.workload_cases import CHECKS, NUMBERS, pairs

load("impls")

ENTRIES = NUMBERS


def draws_in_its_forward(entry: Entry) -> bool:
    """Return whether a variant draws noise in its forward, where a graph cannot seed a generator."""
    if not isinstance(entry.scheme, impls.AbstractScheme):
        return False
    noise = PerturbedLayer.of("", nn.Linear(32, 32), entry.scheme).sample(0, 0, range(1), device="meta")
    return any(isinstance(value, NoiseStream) for value in vars(noise.weight).values())


CAPTURED = [entry for entry in ENTRIES if not draws_in_its_forward(entry)]


@pairs(CHECKS)
def test_every_variant_agrees_with_its_members_own_weights_on_cuda(entry: Entry, case: Case) -> None:
    """Every variant passes the checks of forward, update, moments, purity and splits in float64."""
    build(entry.scheme, case, "cuda", 0).verify()


@pytest.mark.parametrize("dtype", ["float32", "tfloat32", "bfloat16", "float16"])
@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)
def test_narrow_dtypes_err_at_most_twice_the_slow_computation_on_cuda(
    entry: Entry, dtype: str, antithetic: bool
) -> None:
    """On Linear and Conv2d the error is at most twice that of computing with written-out weights."""
    shared: dict[str, Any] = {
        "bias": True,
        "members": 300,
        "repeats": 2,
        "dtype": dtype,
        "antithetic": antithetic,
    }
    linear = Case(operator="Linear", out_channels=96, in_channels=128, **shared)
    conv = Case(
        operator="Conv2d", out_channels=16, in_channels=8, kernel_size=(3, 3), input_size=(8, 8), **shared
    )
    for case in (linear, conv):
        with precision(dtype):
            build(entry.scheme, case, "cuda", 0).verify()


@pytest.mark.parametrize("entry", CAPTURED, ids=lambda entry: entry.variant.name)
def test_a_forward_in_a_graph_reads_what_was_written_into_its_inputs(entry: Entry) -> None:
    """A captured forward, replayed after its inputs changed, gives the results of direct calls."""
    case = Case(operator="Linear", out_channels=48, in_channels=64, members=32)
    work = build(entry.scheme, case, "cuda", 0)
    work.enter("forward")
    replay = CudaClock("graph", Cuda(), Streak()).prepare(work.phases["forward"], len(work.inputs))
    validation.check_replay(work, "forward", replay)


@pytest.mark.parametrize(
    "scheme", [impls.Perturbed(), impls.Permuted("both"), impls.Flipped("both"), impls.Orthogonal()], ids=str
)
def test_sampling_on_cuda_leaves_every_global_generator_alone(scheme: impls.AbstractScheme[Any]) -> None:
    """Sampling is repeatable and leaves torch's global CPU and GPU generators as they were."""
    population = impls.perturb(nn.Linear(64, 64).cuda(), scheme, members=600, sigma=0.1)
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = population.sample(3)
    again = population.sample(3)
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.cuda.get_rng_state())
    for member in (0, 255, 256, 599):
        noise_before, noise_after = (population.perturbation(noise, member) for noise in (first, again))
        assert all(torch.equal(noise_before[name], noise_after[name]) for name in noise_before)
