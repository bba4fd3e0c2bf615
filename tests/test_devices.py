"""Variants on a device other than the CPU: no tensor of the one meets a tensor of the other."""

import pytest
import torch
from torch import nn

import impls
import impls.oracle
from esbench.records import Case
from esbench.registry import Entry, build
from impls import perturb
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
