"""What every registered scheme survives: odd shapes, few members, narrow types, compilation, autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esbench.registry import Entry
from impls import Population, perturb
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.verify.reference import check_forward, check_update
from tests.workload_cases import NUMBERS

ENTRIES = [entry for entry in NUMBERS if isinstance(entry.scheme, AbstractScheme)]
each_scheme = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)


def scheme_of(entry: Entry) -> AnyScheme:
    """Return an entry's scheme, typed."""
    assert isinstance(entry.scheme, AbstractScheme)
    return entry.scheme


def served(entry: Entry, model: nn.Module, **options: Any) -> Population | None:
    """Make a population, or return None where the scheme refuses the shape and names its numbers."""
    try:
        return perturb(model, scheme_of(entry), **options)
    except ValueError as error:
        reason = str(error)
    assert any(character.isdigit() for character in reason), reason
    return None


def seeded(module: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Fill a module's parameters with the same numbers every time."""
    generator = torch.Generator().manual_seed(0)
    module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (3, 7), (17, 33)], ids=str)
@pytest.mark.parametrize("members", [1, 3])
@each_scheme
def test_widths_of_one_and_no_power_of_two_are_right_or_refused(
    entry: Entry, shape: tuple[int, int], members: int
) -> None:
    """A layer (out, in) of any width and a population of one are served rightly, or refused in words."""
    model = seeded(nn.Linear(shape[1], shape[0]))
    population = served(entry, model, members=members, sigma=0.1)
    if population is not None:
        x = torch.randn(members, shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        check_forward(population, x, range(members))
        check_update(population, x, range(members))


@each_scheme
def test_a_convolution_of_one_channel_is_right_or_refused(entry: Entry) -> None:
    """One input channel, one output channel, one image a member."""
    model = seeded(nn.Conv2d(1, 1, (2, 3), padding=1))
    population = served(entry, model, members=2, sigma=0.1)
    if population is not None:
        x = torch.randn(2, 1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        check_forward(population, x, range(2))
        check_update(population, x, range(2))


@pytest.mark.parametrize("scale", [1e3, 1e30, 1e-30])
@each_scheme
def test_utilities_of_any_size_meet_narrow_types_scaled(entry: Entry, scale: float) -> None:
    """They are scaled before; a gradient that float16 cannot hold is an error, and no infinity."""
    model = seeded(nn.Linear(6, 4), torch.float16)
    population = perturb(model, scheme_of(entry), members=5, sigma=0.1)
    noise = population.sample(0)
    utilities = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    _, record = population.call_with_activations(torch.ones(5, 6, dtype=torch.float16), noise)
    population.update(noise, utilities, record)
    assert isinstance(model.weight.grad, Tensor)
    expected = scale * model.weight.grad.double()
    model.zero_grad()
    if bool((expected.abs() > torch.finfo(torch.float16).max).any()):
        with pytest.raises(ValueError, match=r"does not fit torch\.float16"):
            population.update(noise, utilities * scale, record)
    else:
        population.update(noise, utilities * scale, record)
        assert isinstance(model.weight.grad, Tensor)
        torch.testing.assert_close(model.weight.grad.double(), expected, rtol=2e-3, atol=1e-7)


@each_scheme
def test_an_empty_batch_is_refused(entry: Entry) -> None:
    """No rows are no population."""
    population = perturb(nn.Linear(6, 4), scheme_of(entry), members=5, sigma=0.1)
    with pytest.raises(ValueError, match="0 rows"):
        population(torch.empty(0, 6), population.sample(0))


@each_scheme
def test_a_layer_of_another_kind_is_refused_by_name(entry: Entry) -> None:
    """A scheme asked for on an operator that nobody can serve says which one, and gives no answer."""
    with pytest.raises(ValueError, match="Embedding"):
        perturb(nn.Embedding(6, 4), scheme_of(entry), members=5, sigma=0.1)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize(
    ("op", "weight_shape", "space"), [(Linear(), (1, 8, 6), ()), (Conv2d(groups=2), (2, 4, 3, 3, 3), (5, 5))]
)
@each_scheme
def test_a_compiled_forward_agrees_with_the_eager_one(
    entry: Entry,
    op: AbstractOperator,
    weight_shape: tuple[int, ...],
    space: tuple[int, ...],
    *,
    antithetic: bool,
) -> None:
    """What torch.compile traces of a forward gives what the forward itself gives."""
    generator, members, sigma = torch.Generator().manual_seed(0), 4, 0.1
    flat = (weight_shape[0] * weight_shape[1], *weight_shape[2:])
    weight = torch.randn(flat, generator=generator)
    module = nn.Linear(6, 8, bias=False) if not space else nn.Conv2d(6, 8, 3, groups=2, bias=False)
    with torch.no_grad():
        module.weight.copy_(weight)
    population = perturb(module, scheme_of(entry), members=members, sigma=sigma)
    noise = population.sample(0).layers[""].weight
    x = torch.randn(2, members, weight_shape[0], weight_shape[2], *space, generator=generator)
    grouped = weight.unflatten(0, (weight_shape[0], -1))
    scale: Any = sigma
    if antithetic:
        scale = torch.tensor([sigma, -sigma]).view(2, *[1] * (x.dim() - 1))

    def forward(x: Tensor) -> Tensor:
        return scheme_of(entry).forward(op, grouped, noise, x, scale)

    torch.compiler.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(forward, backend="aot_eager")
        torch.testing.assert_close(compiled(x), forward(x), rtol=1e-5, atol=1e-5)
