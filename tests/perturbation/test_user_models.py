"""What users do with populations: each member agrees with its written-out model, or the use is refused."""

import copy
import itertools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import impls
from impls.perturbation.population import Population, PopulationNoise
from impls.perturbation.scheme import AbstractScheme, TensorRef
from tests.scheme_cases import fill, normal
from tests.workload_cases import ENTRIES


class Model(nn.Module):
    """A model of two layers with a forward of the test's choice."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.run = nn.Linear(3, 3), nn.Linear(3, 3), run

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.run(self, x)


def perturb(model: nn.Module, scheme: Any = None, **options: Any) -> Population:
    """Make a population of four members."""
    return impls.perturb(fill(model), scheme or impls.Perturbed(), members=4, **{"sigma": 0.5, **options})


def check_members(population: Population, noise: PopulationNoise, x: Tensor | None = None) -> None:
    """Compare each row with the model that has its member's written-out weights."""
    x = normal(8, 3) if x is None else x
    y = population(x, noise)
    for row in range(len(x)):
        negated = population.antithetic and row >= len(x) // 2
        alone = copy.deepcopy(population.model)
        alone.load_state_dict(population.member(noise, row % 4, negated=negated), strict=False)
        torch.testing.assert_close(y[row], alone(x[row : row + 1])[0].detach(), rtol=1e-9, atol=1e-11)


def in_thread(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer in another thread, without gradients."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.no_grad()(layer), x).result()


def uses(use: Any) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward in which a weight is used before the layers run."""

    def run(model: Any, x: Tensor) -> Tensor:
        use(model.first.weight)
        return model.second(model.first(x))

    return run


PROPERTIES: dict[str, Callable[[Tensor], object]] = {
    "shape": lambda weight: weight.shape,
    "dtype": lambda weight: weight.dtype,
    "device": lambda weight: weight.device,
    "size": lambda weight: weight.size(0),
    "len": len,
    "repr": repr,
}
RIGHT: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "in order": lambda model, x: model.second(model.first(x).tanh()),
    "twice": lambda model, x: model.first(model.second(model.first(x))),
    **{name: uses(use) for name, use in PROPERTIES.items()},
}
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "layer left out": (lambda model, x: model.first(x), "did not use the perturbed layers second"),
    "thread": (lambda model, x: model.second(in_thread(model.first, x)), "in another thread"),
    "thread and here": (
        lambda model, x: model.second(model.first(in_thread(model.first, x))), "linear while .* thread"
    ),
    **{
        name: (uses(use), rf"layer 'first' is used by torch\.Tensor\.{name}")
        for name, use in {
            "data_ptr": torch.Tensor.data_ptr,
            "untyped_storage": torch.Tensor.untyped_storage,
            "numpy": torch.Tensor.numpy,
            "item": torch.Tensor.item,
            "tolist": torch.Tensor.tolist,
            "__array__": torch.Tensor.__array__,
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("antithetic", [False, True])
def test_members_are_those_of_their_written_out_models(antithetic: bool) -> None:
    """A model may call its layers in any order and read properties of their weights."""
    for run in RIGHT.values():
        population = perturb(Model(run), antithetic=antithetic)
        check_members(population, population.sample(0))


@pytest.mark.parametrize(("run", "words"), REFUSED.values(), ids=REFUSED)
def test_a_layer_or_value_without_its_members_is_refused(run: Any, words: str) -> None:
    """A perturbed layer that is not reached, and a value of a weight, raise; the model is intact."""
    model = Model(run)
    population = perturb(model)
    with pytest.raises(ValueError, match=words):
        check_members(population, population.sample(0))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_replaced_layer_is_refused_and_an_optional_one_may_be_left_out() -> None:
    """A forward must reach each layer that was perturbed, unless it is optional; a copy checks the same."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    population = perturb(model)
    model[0] = fill(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="did not use the perturbed layers 0: call perturb"):
        check_members(population, population.sample(0))

    partial = perturb(Model(lambda model, x: model.first(x)), optional=["second"])
    check_members(partial, partial.sample(0))
    twin = copy.deepcopy(partial)
    check_members(twin, twin.sample(0))
    with pytest.raises(ValueError, match="optional='third' matches no module"):
        perturb(Model(lambda model, x: model.first(x)), optional=["third"])


def test_only_sigma_may_change() -> None:
    """A population refuses other members and an invalid sigma; after a new sigma it is sampled again."""
    for scheme in (impls.Perturbed(), impls.Perturbed("weights")):
        population = perturb(nn.Linear(3, 3), scheme)
        noise = population.sample(0)
        for name, value in {"members": 16, "antithetic": True, "seed": 1, "layers": ()}.items():
            with pytest.raises(AttributeError, match=f"{name} of a population cannot be changed"):
                setattr(population, name, value)
        for sigma in (-1, 0, float("nan"), True):
            with pytest.raises(ValueError, match="sigma must be a number above 0"):
                population.sigma = sigma
        check_members(population, noise)
        population.sigma = 0.25
        calls: list[tuple[Callable[..., object], object]] = [
            (population.member, 0), (population.update, torch.zeros(4))
        ]  # fmt: skip
        for call, argument in calls:
            with pytest.raises(ValueError, match=r"sigma was changed from 0\.5 to 0\.25 after sample"):
                call(noise, argument)
        check_members(population, population.sample(0))


def test_utilities_on_the_wrong_axis_are_refused() -> None:
    """Utilities have one axis, or the axes [2, members] with antithetic sampling."""
    wrong: dict[bool, tuple[tuple[int, ...], ...]] = {False: ((2, 2),), True: ((4, 2), (2, 2, 2), (1, 8, 1))}
    right: dict[bool, tuple[tuple[int, ...], ...]] = {False: ((4,), (4, 1)), True: ((8,), (8, 1), (2, 4))}
    for antithetic, shapes in wrong.items():
        population = perturb(nn.Linear(3, 3), antithetic=antithetic)
        noise, values = population.sample(0), normal(8 if antithetic else 4)
        gradients: list[Any] = []
        for shape in right[antithetic]:
            population.model.zero_grad()
            population.update(noise, values.view(shape))
            gradients.append(population.layers[0].weight.grad)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
        for shape in shapes[:2]:
            with pytest.raises(ValueError, match="got utilities of shape"):
                population.update(noise, values.view(shape))


def test_excluded_modules_are_excluded_with_all_inside_them() -> None:
    """A pattern excludes a module and the modules inside it; a string instead of a list is refused."""
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Sequential(nn.Linear(3, 3)), "header": Raw()})
    population = perturb(model, exclude=["head", "header"])
    assert [layer.name for layer in population.layers] == ["body"]
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(11)))
    with pytest.raises(ValueError, match=r"exclude must be a list of patterns, got '10': pass \['10'\]"):
        perturb(layers, exclude="10")
    assert len(perturb(layers, exclude=["10"]).layers) == 10


class Raw(nn.Module):
    """A module with a parameter that cannot be perturbed."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))


def shift(parameter: nn.Parameter) -> None:
    """Change a parameter in place, as optimizers do."""
    with torch.no_grad():
        parameter.add_(0.25)


def replace_data(parameter: nn.Parameter) -> None:
    """Replace a parameter's data."""
    parameter.data = parameter.data + 0.25


@pytest.mark.parametrize("move", [shift, replace_data])
def test_noise_follows_moved_weights_or_is_refused(move: Callable[[nn.Parameter], None]) -> None:
    """After the weights moved, members of every scheme are right, or its noise is refused."""
    schemes = [entry.scheme for entry in ENTRIES if isinstance(entry.scheme, AbstractScheme)]
    assert len(schemes) > 10
    for scheme in schemes:
        layer = impls.BinarizedLinear(8, 8) if scheme.draws_binary_weights else nn.Linear(8, 8)
        try:
            population = impls.perturb(fill(layer), scheme, members=4, sigma=0.5)
        except impls.UnsupportedError:
            continue  # needs a GPU
        noise, x = population.sample(0), normal(8, 8)
        if scheme.draws_binary_weights:
            x = torch.arange(8).view(8, 1)  # packed bits
        move(population.layers[0].weight)
        stores_address = any(isinstance(field, TensorRef) for field in vars(noise.layers[""].weight).values())
        if scheme.stores_weight or (stores_address and move is replace_data):
            with pytest.raises(ValueError, match=r"call sample\(\) again"):
                population(x, noise)
            noise = population.sample(0)
        y = population(x, noise)
        for row in () if scheme.draws_binary_weights else range(8):
            expected = torch.func.functional_call(layer, population.member(noise, row % 4), (x[row],))
            torch.testing.assert_close(y[row], expected, rtol=1e-9, atol=1e-11, msg=str(scheme))


@pytest.mark.parametrize("antithetic", [False, True])
def test_rows_and_fitness_belong_to_their_members(antithetic: bool) -> None:
    """rows() shows each input to each member, and fitness() is the mean of its rows."""
    population = perturb(nn.Linear(3, 1), antithetic=antithetic)
    noise, inputs = population.sample(0), normal(6, 3)
    fitness = population.fitness(population(population.rows(inputs), noise).squeeze(1), noise)
    for member in range(4):
        for side in range(1 + antithetic):
            weights = population.member(noise, member, negated=bool(side))
            expected = torch.func.functional_call(population.model, weights, (inputs,)).mean()
            torch.testing.assert_close(fitness[side, member] if antithetic else fitness[member], expected)
    population.update(noise, fitness)
    assert population.rows(inputs, noise).shape == ((48 if antithetic else 24), 3)
    for shape in ((20, 1), (7,)):
        with pytest.raises(ValueError, match=r"one number per row|not a multiple of 4 members"):
            population.fitness(torch.zeros(shape))


def test_other_tensors_over_a_perturbed_memory_are_refused() -> None:
    """A tensor over a perturbed parameter's memory is refused; disjoint parts of one memory are not."""

    def tie(change: Callable[[Any], object]) -> nn.Sequential:
        model = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
        change(model)
        return model

    ties: dict[str, Callable[[Any], object]] = {
        "0.weight and 2.weight": lambda model: setattr(
            model[2], "weight", nn.Parameter(model[0].weight.data)
        ),
        "0.bias and 2.bias": lambda model: setattr(model[2], "bias", nn.Parameter(model[0].bias.data)),
        "0.weight and 2.weight ": lambda model: setattr(
            model[2], "weight", nn.Parameter(model[0].weight.data.T)
        ),
        "0.weight and 2.bias": lambda model: setattr(model[2], "bias", nn.Parameter(model[0].weight.data[1])),
        "0.weight and 1.alias": lambda model: model[1].register_buffer("alias", model[0].weight.data),
        "0.weight and alias": lambda model: setattr(model, "alias", model[0].weight.detach()[2, 1:]),
    }
    for names, change in ties.items():
        with pytest.raises(ValueError, match=f"^{names.strip()} share memory"):
            perturb(tie(change))
    flat = tie(lambda model: nn.utils.vector_to_parameters(normal(24), model.parameters()))
    population = perturb(flat)
    check_members(population, population.sample(0))


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply; scripted, in code that no function mode sees."""
    return x @ weight.t()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_product = torch.jit.script(product)


WRONG: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "reordered rows": lambda model, x: model.second(model.first(x).flip(0)),
    "mixed rows": lambda model, x: model.second(model.first(x) - x.mean(0)),
    "random numbers": lambda model, x: model.second(functional.dropout(model.first(x))),
    "scripted code": lambda model, x: model.second(model.first(x)) + scripted_product(x, model.first.weight),
}


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verify_finds_models_that_do_not_work_in_a_population(dtype: torch.dtype, antithetic: bool) -> None:
    """verify() accepts models whose rows are those of their members, and refuses others."""
    schemes: tuple[Any, ...] = impls.Perturbed(), impls.Flipped("both")
    for sigma, scheme in itertools.product((0.5, 1e-3), schemes):
        x = normal(16, 3).to(dtype)
        for run in RIGHT.values():
            impls.perturb(
                fill(Model(run), dtype), scheme, members=4, sigma=sigma, antithetic=antithetic
            ).verify(x)
        for run in WRONG.values():
            population = impls.perturb(
                fill(Model(run), dtype), scheme, members=4, sigma=sigma, antithetic=antithetic
            )
            with pytest.raises(ValueError, match=r"row \d+ \(repeat \d, member \d\) differs"):
                population.verify(x)
    with pytest.raises(ValueError, match=r"verify compares rows, but the model returned tuple"):
        perturb(Model(lambda model, x: (model.first(model.second(x)),))).verify(normal(8, 3))  # type: ignore[arg-type, return-value]  # wrong
