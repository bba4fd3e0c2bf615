"""Counted noise on a CUDA GPU: the CPU's words, and forwards that draw again inside a graph."""

import pytest
import torch
from torch import Tensor, nn

from impls import NoiseTable, Regenerated, RegeneratedSign, perturb, philox
from impls.philox import BITS, NORMAL, UNIFORM, Kind, Place, integer
from impls.scheme import AnyScheme

PLACE = Place.of(0, 0, "layer", "draw")


def fill(kind: Kind, device: str) -> Tensor:
    """Draw members around 2^31 and elements that begin inside a call, of many tiles on a CPU."""
    dtype = torch.int64 if kind is BITS else torch.float64
    values = torch.empty(5, 300_001, dtype=dtype, device=device)
    members = range(2**31 - 2, 2**31 + 3)
    return philox.fill(values, kind, PLACE, members, range(3, 300_004)).cpu()


@pytest.mark.parametrize("kind", [UNIFORM, BITS, integer(1000)])
def test_values_are_those_of_the_cpu(kind: Kind) -> None:
    """Uniforms, words and integers have the same bits on either device."""
    assert torch.equal(fill(kind, "cuda"), fill(kind, "cpu"))


def test_normals_are_those_of_the_cpu_up_to_its_functions() -> None:
    """Normals differ by what logarithm, square root, sine and cosine of float32 do."""
    here, there = fill(NORMAL, "cuda"), fill(NORMAL, "cpu")
    # A radius below 7 times a few roundings, and an angle below 7 with its own.
    assert float((here - there).abs().max()) < 64 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("scheme", [Regenerated(), RegeneratedSign(), NoiseTable()], ids=str)
def test_a_graph_draws_the_noise_again(scheme: AnyScheme) -> None:
    """A captured forward and update, replayed, give what the calls give: nothing waits for the device."""
    model = nn.Linear(64, 48).cuda()
    population = perturb(model, scheme, members=32, sigma=0.1, stream="philox")
    noise = population.sample(0)
    x, utilities = torch.randn(32, 64, device="cuda"), torch.randn(32, device="cuda")

    def call() -> tuple[Tensor, Tensor]:
        model.weight.grad = model.bias.grad = None
        y: Tensor = population(x, noise)
        population.update(noise, utilities, validate=False)
        assert model.weight.grad is not None
        return y, model.weight.grad

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call()
    x.normal_()
    utilities.normal_()
    graph.replay()
    torch.cuda.synchronize()
    for replayed, expected in zip(captured, call(), strict=True):
        torch.testing.assert_close(replayed, expected)
