"""Philox noise on a CUDA GPU: the same values as on the CPU, and CUDA graphs that draw noise."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from esbench.measure import validation
from esbench.measure.cuda import Cuda, Streak
from esbench.measure.timers import CudaClock
from esbench.schema import PHASES, Case, Phase
from esbench.workload import UnavailableError, build
from impls import (
    FusedLowRank,
    FusedRegenerated,
    FusedRegeneratedSign,
    LowRank,
    NoiseTable,
    Permuted,
    Perturbed,
    Regenerated,
    RegeneratedSign,
    perturb,
)
from impls.perturbation import philox
from impls.perturbation.noise import PhiloxStream
from impls.perturbation.philox import BITS, NORMAL, UNIFORM, Distribution, DrawKey, integers_below
from impls.perturbation.scheme import AnyScheme

PLACE = DrawKey.of(0, 0, "layer", "draw")


def fill(distribution: Distribution, device: str) -> Tensor:
    """Draw members around 2^31, and elements that start inside a Philox call and span many tiles on a CPU."""
    dtype = torch.int64 if distribution is BITS else torch.float64
    values = torch.empty(5, 300_001, dtype=dtype, device=device)
    members = range(2**31 - 2, 2**31 + 3)
    return philox.fill(values, distribution, PLACE, members, range(3, 300_004)).cpu()


@pytest.mark.parametrize("distribution", [UNIFORM, BITS, integers_below(1000)])
def test_values_are_those_of_the_cpu(distribution: Distribution) -> None:
    """Uniforms, words and integers have the same bits on the GPU as on the CPU."""
    assert torch.equal(fill(distribution, "cuda"), fill(distribution, "cpu"))


def test_normals_are_those_of_the_cpu_up_to_its_functions() -> None:
    """Normals differ from the CPU's by a few roundings of log, sqrt, sin and cos in float32."""
    here, there = fill(NORMAL, "cuda"), fill(NORMAL, "cpu")
    # Radius and angle are below 7, and each is off by a few roundings.
    assert float((here - there).abs().max()) < 64 * torch.finfo(torch.float32).eps


def test_levels_are_those_of_the_cpu() -> None:
    """Uniform noise has the same bits on the GPU as on the CPU, in every dtype."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        here, there = (
            PhiloxStream(1, 2, "0.weight", range(2**31 - 2, 2**31 + 2), torch.device(device), dtype)
            for device in ("cpu", "cuda")
        )
        assert torch.equal(there.levels("dense", 3, 333).cpu(), here.levels("dense", 3, 333))


def capture(call: Callable[[], Sequence[Tensor]]) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """Capture a call in a CUDA graph, after a call that warms it up; return the graph and its results."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    return graph, results


@pytest.mark.parametrize("scheme", [Regenerated(), RegeneratedSign(), NoiseTable()], ids=str)
def test_a_graph_draws_the_noise_again(scheme: AnyScheme) -> None:
    """A replayed graph of forward and update gives the results of direct calls on the new inputs."""
    model = nn.Linear(64, 48).cuda()
    population = perturb(model, scheme, members=32, sigma=0.1, stream="philox")
    noise = population.sample(0)
    x, utilities = torch.randn(32, 64, device="cuda"), torch.randn(32, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        model.weight.grad = model.bias.grad = None
        y: Tensor = population(x, noise=noise)
        population.update(noise, utilities)
        assert model.weight.grad is not None
        return y, model.weight.grad

    graph, captured = capture(call)
    x.normal_()
    utilities.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for replayed, expected in zip(captured, call(), strict=True):
        torch.testing.assert_close(replayed, expected)


@pytest.mark.parametrize(
    "scheme",
    [
        Perturbed(),
        LowRank(2),
        Permuted(),
        Regenerated(),
        FusedRegenerated(),
        FusedRegenerated("uniform"),
        FusedLowRank(1, regenerated=True),
    ],
    ids=str,
)
def test_replays_of_a_captured_step_draw_step_after_step(scheme: AnyScheme) -> None:
    """Each replay of a captured training step gives the outputs and gradients of the next step's noise."""
    model = nn.Linear(64, 48).cuda()
    population = perturb(model, scheme, members=32, sigma=0.1, stream="philox")
    x, utilities = torch.randn(32, 64, device="cuda"), torch.randn(32, device="cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")

    def gradients(number: int | Tensor) -> list[Tensor]:
        model.zero_grad()
        noise = population.sample(number)
        y, record = population.call_with_activations(x, noise=noise)
        population.update(noise, utilities, record)
        return [y, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    def train() -> list[Tensor]:
        results = gradients(step)
        step.add_(1)
        return results

    graph, captured = capture(train)
    for number in (1, 2, 3):
        graph.replay()
        torch.cuda.synchronize()
        replayed = [tensor.clone() for tensor in captured]
        for result, expected in zip(replayed, gradients(number), strict=True):
            torch.testing.assert_close(result, expected)


CASE = Case(operator="Linear", out_channels=48, in_channels=64, bias=True, members=32)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    "scheme", [FusedRegenerated(), FusedRegeneratedSign(), FusedLowRank(1, regenerated=True)], ids=str
)
def test_every_phase_of_a_scheme_that_draws_in_kernels_is_captured(scheme: AnyScheme, phase: Phase) -> None:
    """Every phase of a scheme that draws in kernels can be captured, and its replays match direct calls."""
    workload = build(scheme, CASE, "cuda", 0)
    workload.enter(phase)
    clock = CudaClock("graph", Cuda(), Streak())
    replay = clock.prepare(workload.phases[phase], max(1, len(workload.inputs)))
    validation.check_replay(workload, phase, replay)


@pytest.mark.parametrize("phase", ["sample", "step"])
def test_the_stream_block_is_not_captured_with_the_reason(phase: Phase) -> None:
    """Capturing the stream block raises an error that suggests philox, and the device still works."""
    workload = build(Perturbed(), CASE, "cuda", 0)
    workload.enter(phase)
    clock = CudaClock("graph", Cuda(), Streak())
    with pytest.raises(UnavailableError, match="use stream='philox'"):
        clock.prepare(workload.phases[phase], max(1, len(workload.inputs)))
    workload.phases[phase]()
    torch.cuda.synchronize()
