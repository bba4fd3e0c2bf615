"""Variants on a device other than the CPU: no tensor of the one meets a tensor of the other."""

from typing import Any

import pytest
import torch
from torch import nn

import impls
import impls.oracle
from esbench.records import Case
from esbench.registry import Entry, build
from impls import inputs, perturb
from tests.simulated_cuda import CUDA, SimulatedTensor, simulated_cuda
from tests.workload_cases import CHECKS, ENTRIES, pairs

SCHEMES = {entry.variant.scheme: entry for entry in ENTRIES}.values()
GROUPED, BITS = CHECKS[1], next(case for case in CHECKS if case.operator == "BinarizedLinear")


@pairs((GROUPED, BITS), SCHEMES)
def test_every_scheme_passes_its_check_on_another_device(
    entry: Entry, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check creates its rows and utilities where the layer is."""
    monkeypatch.setattr(impls.oracle, "STEPS", 24)
    with simulated_cuda():
        build(entry.scheme, case, str(CUDA), 0).verify()


@pytest.mark.parametrize("case", [GROUPED, BITS], ids=lambda case: case.operator)
def test_weights_are_drawn_on_the_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every build has the same weights, and none waits for the CPU to draw them."""
    places, randn = [], torch.randn

    def drawn(*shape: Any, device: Any = "cpu", **options: Any) -> torch.Tensor:
        places.append(torch.device(device))
        return randn(*shape, device=device, **options)

    monkeypatch.setattr(torch, "randn", drawn)
    with simulated_cuda():
        one, other = (inputs.layer(case, str(CUDA), 7).state_dict() for _ in range(2))
        assert all(torch.equal(values, other[name]) for name, values in one.items())
    assert set(places) == {CUDA}


@pytest.mark.parametrize("antithetic", [False, True])
def test_an_update_takes_utilities_from_the_cpu(antithetic: bool) -> None:
    """Fitness is often computed on the CPU; the gradient is that of utilities on the layers' device."""
    gradients = []
    with simulated_cuda():
        for device in ("cpu", CUDA):
            model = nn.Linear(3, 2).to(CUDA)
            population = perturb(model, impls.Perturbed(), members=4, sigma=0.1, antithetic=antithetic)
            utilities = torch.arange(8.0 if antithetic else 4.0).to(device)
            population.update(population.sample(0), utilities)
            assert isinstance(model.weight.grad, SimulatedTensor)
            gradients.append(model.weight.grad.on_cpu)
    assert torch.equal(*gradients)
