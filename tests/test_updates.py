"""Updates of hard cases: huge and shifted utilities, many pieces, rows and weights that changed meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import impls
from esbench.registry import WrongResultError
from impls import Population, perturb
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AnyScheme
from impls.schemes import permuted
from impls.schemes.torch_baselines import RedrawnNoise
from impls.verify.checks import Setting
from impls.verify.reference import check_forward, updated

ROW_SCHEMES: list[AnyScheme] = [impls.DropoutMask(side="out"), impls.DropoutBlocks(side="both", groups=8)]


def layer(dtype: torch.dtype = torch.float32, width: int = 16) -> nn.Linear:
    """Make a square layer with fixed weights."""
    module = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        module.weight.copy_(torch.randn(width, width, generator=torch.Generator().manual_seed(0)) / 4)
    return module.to(dtype)


def relative(got: Tensor, truth: Tensor) -> float:
    """Return the error relative to the truth's norm."""
    return float((got.double() - truth.double()).norm() / truth.double().norm())


@pytest.mark.parametrize("scheme", [*ROW_SCHEMES, impls.LowRank(1), impls.DropoutMask()], ids=str)
def test_what_antithetic_utilities_have_in_common_changes_nothing(scheme: AnyScheme) -> None:
    """A million added to every utility leaves the update as it was, also in bfloat16."""
    population = perturb(layer(torch.bfloat16), scheme, members=64, sigma=0.1, antithetic=True)
    noise, generator = population.sample(0), torch.Generator().manual_seed(1)
    _, record = population.call_with_activations(torch.randn(128, 16, generator=generator).bfloat16(), noise)
    utilities = torch.randn(128, dtype=torch.float64, generator=generator)
    here, there = (updated(population, noise, utilities + shift, record)["weight"] for shift in (0.0, 1e6))
    assert relative(there, here) < 1e-6


def test_utilities_whose_squares_overflow_have_a_direction() -> None:
    """Finite utilities give a finite update, as long as the update itself is one."""
    population = perturb(layer(torch.float64), impls.Perturbed(), members=4, sigma=0.1)
    noise, utilities = population.sample(0), torch.tensor([1.0, -1.0, 2.0, 0.0], dtype=torch.float64)
    plain, huge = (updated(population, noise, utilities * size)["weight"] for size in (1.0, 1e200))
    assert relative(huge / 1e200, plain) < 1e-12


@pytest.mark.parametrize(
    ("scheme", "members"),
    [
        (impls.LowRank(1, regenerated=True), 2**14),
        (impls.Permuted("both"), 2048),
        (impls.Perturbed("weights"), 2048),
    ],
    ids=str,
)
def test_a_sum_of_many_pieces_keeps_its_digits(
    scheme: AnyScheme, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 an update is off by about one rounding, however many pieces it is added up from."""
    monkeypatch.setattr(permuted, "PIECE_BYTES", {"cpu": 2048})
    monkeypatch.setattr("impls.schemes.dense.PIECE_BYTES", {"cpu": 2048})
    population = perturb(layer(torch.bfloat16), scheme, members=members, sigma=0.1)
    noise = population.sample(0)
    utilities = torch.randn(members, generator=torch.Generator().manual_seed(1)).double()
    scale = (utilities / utilities.norm()).bfloat16().double()
    written = population.dense_noise(noise)["weight"].double()
    truth = -torch.tensordot(scale, written, dims=1) * utilities.norm() / (members * 0.1)
    assert (
        relative(updated(population, noise, utilities)["weight"], truth) < 2 * torch.finfo(torch.bfloat16).eps
    )


class Residual(nn.Module):
    """A layer with a residual connection, added by a function of the caller's choice."""

    def __init__(self, inner: nn.Module, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Take the layer and how to add."""
        super().__init__()
        self.inner, self.add = inner, add

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, self.inner(x))


@pytest.mark.parametrize("scheme", ROW_SCHEMES, ids=str)
def test_rows_that_were_changed_in_place_are_refused(scheme: AnyScheme) -> None:
    """A model that overwrites what a layer saw leaves an update that cannot be had, and is told so."""
    x, utilities = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)
    functions: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, Tensor.add_]
    for add in functions:
        population = perturb(Residual(layer(), add), scheme, members=8, sigma=0.1)
        noise = population.sample(0)
        _, record = population.call_with_activations(x.clone(), noise)
        if add is torch.add:
            population.update(noise, utilities, record)
        else:
            with pytest.raises(ValueError, match=r"layer 'inner' saw were changed in place"):
                population.update(noise, utilities, record)


def test_a_record_of_other_noise_is_refused() -> None:
    """Rows that were seen with the noise of one step are no rows of another."""
    population = perturb(layer(), ROW_SCHEMES[0], members=8, sigma=0.1)
    first, second = population.sample(0), population.sample(1)
    _, record = population.call_with_activations(torch.randn(8, 16), first)
    with pytest.raises(ValueError, match="other noise"):
        population.update(second, torch.arange(8.0), record)
    population.update(first, torch.arange(8.0), record)


@pytest.mark.parametrize("scheme", [impls.DropoutMask(), impls.DropConnect(), impls.DropoutBlocks()], ids=str)
def test_noise_that_scales_with_the_weight_knows_its_weight(scheme: AnyScheme) -> None:
    """Written into, the weight is the noise's still; put in place of by another tensor, it is refused."""
    population = perturb(module := layer(), scheme, members=8, sigma=1.0)
    noise, x = population.sample(0), torch.randn(8, 16)
    with torch.no_grad():
        module.weight.mul_(2)
    written = population.member(noise, 3)["weight"]
    torch.testing.assert_close(population(x, noise)[3], written @ x[3])
    nn.utils.vector_to_parameters(torch.randn(256), module.parameters())
    with pytest.raises(ValueError, match="was replaced since its noise was drawn"):
        population(x, noise)


def test_a_member_has_every_name_of_a_shared_parameter() -> None:
    """Two layers that share a bias are written out with the members' own under both names."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.bias = first.bias
    population = perturb(nn.Sequential(first, second), impls.Perturbed(), members=3, sigma=0.1)
    assert set(population.member(population.sample(0), 1)) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def test_a_shared_parameter_is_excluded_everywhere_or_nowhere() -> None:
    """A layer that is to stay as it is cannot share what is perturbed."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight, second.bias = first.weight, first.bias
    model = nn.Sequential(first, second, nn.Linear(4, 4))
    with pytest.raises(ValueError, match="0 is excluded but shares a parameter with 1"):
        perturb(model, impls.Perturbed(), members=3, sigma=0.1, exclude=["0"])
    assert isinstance(perturb(model, impls.Perturbed(), members=3, sigma=0.1, exclude=["0", "1"]), Population)


@dataclass(frozen=True)
class DriftingLoop(impls.Loop):
    """Adds a member's noise to the weight and takes it off again, where rounding is lost at each."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: RedrawnNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        saved, outputs = weight.clone(), []
        for member in range(x.shape[1]):
            change = noise.member(member)
            weight.add_(change, alpha=float(sigma))
            outputs.append(op.apply_shared(x[:, member : member + 1], weight))
            weight.sub_(change, alpha=float(sigma))
        weight.copy_(saved)
        return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(("scheme", "is_right"), [(impls.Loop(), True), (DriftingLoop(), False)], ids=str)
def test_weights_that_drift_within_a_call_are_found(scheme: AnyScheme, is_right: bool) -> None:
    """Perturb, then restore by subtraction: in bfloat16 the last of many members sees other weights."""
    population = Setting(scheme, layer(torch.bfloat16), (16,)).population(8000)
    x = torch.randn(8000, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    if is_right:
        check_forward(population, x, [0, 7999])
    else:
        with pytest.raises(WrongResultError, match="forward is off"):
            check_forward(population, x, [0, 7999])


@pytest.mark.parametrize("scheme", [impls.Perturbed(), impls.Hadamard(), impls.DropoutMask()], ids=str)
def test_a_compiled_population_agrees_with_the_eager_one(scheme: AnyScheme) -> None:
    """Within torch.compile a population of a model with several layers runs as it does without."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))
    population = perturb(model, scheme, members=5, sigma=0.1)
    noise, x = population.sample(0), torch.randn(5, 2, 4, 4)
    torch.compiler.reset()

    def doubled(x: Tensor) -> Tensor:
        y: Tensor = population(x, noise)
        return 2 * y

    compiled: Any = torch.compile(doubled, backend="aot_eager")
    torch.testing.assert_close(compiled(x), doubled(x))
