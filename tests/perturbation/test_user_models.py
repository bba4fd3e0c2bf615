"""Uses of populations: each member agrees with its written-out model, or an error names the refused use."""

import contextlib
import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _to_dlpack
from torch.nn import functional
from torch.utils.dlpack import from_dlpack
from torch.utils.flop_counter import FlopCounterMode

import impls
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.population import Population, PopulationNoise
from impls.perturbation.scheme import AbstractScheme, TensorRef
from tests import scheme_cases
from tests.scheme_cases import fill, normal
from tests.workload_cases import ENTRIES

PLAIN_SCHEMES = [
    entry.scheme
    for entry in ENTRIES
    if isinstance(entry.scheme, AbstractScheme)
    and not (entry.scheme.draws_binary_weights or entry.scheme.why_unsupported(nn.Linear(3, 3)))
]
"""The schemes that perturb a Linear layer on a CPU."""


class Model(nn.Module):
    """A model of two layers with a forward of the test's choice."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.run = nn.Linear(3, 3), nn.Linear(3, 3), run
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Run the model."""
        return self.run(self, x)


def perturb(model: nn.Module, scheme: Any = None, **options: Any) -> Population:
    """Make a population of four members."""
    return impls.perturb(fill(model), scheme or impls.Perturbed(), members=4, **{"sigma": 0.5, **options})


def perturb_layer(**changes: Any) -> Population:
    """Make a population of four members of one layer."""
    settings: dict[str, Any] = {"members": 4, "sigma": 0.1, **changes}
    return impls.perturb(nn.Linear(6, 5), settings.pop("scheme", impls.Perturbed()), **settings)


def check_members(population: Population, noise: PopulationNoise) -> None:
    """Check eight rows against the models of their members."""
    scheme_cases.check_members(population, noise, normal(8, 3))


def in_thread(layer: nn.Module, x: Tensor) -> Tensor:
    """Run a layer in another thread, without gradients."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.no_grad()(layer), x).result()


def clip(model: Any, x: Tensor) -> Tensor:
    """Clip a weight in place, as Wasserstein critics do, and run the layers."""
    model.first.weight.clamp_(-0.01, 0.01)
    y: Tensor = model.second(model.first(x))
    return y


def uses(use: Any) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward in which a weight is used before the layers run."""

    def run(model: Any, x: Tensor) -> Tensor:
        use(model.first.weight)
        return model.second(model.first(x))

    return run


def changes_bias(change: Any) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward in which a bias is changed before the layers run."""

    def run(model: Any, x: Tensor) -> Tensor:
        change(model.first.bias)
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


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply; scripted or compiled, in code that no function mode sees."""
    return x @ weight.t()


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_product = torch.jit.script(product)


def without_torch_functions(model: Any, x: Tensor) -> Tensor:
    """Run a layer where torch functions cannot be overridden."""
    with DisableTorchFunction():
        y = model.first(x)
    return model.second(model.first(y))


def catch(model: Any, x: Tensor) -> Tensor:
    """Catch the error of a refused operation, and go on."""
    with contextlib.suppress(RuntimeError):
        x = x + scripted_product(x, model.first.weight)
    return model.second(model.first(x))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "layer left out": (lambda model, x: model.first(x), "did not use the perturbed layers second"),
    "no layer": (lambda model, x: x, "used none of its 2 perturbed layers"),  # noqa: ARG005  left unused
    "another function": (lambda model, x: model.first(x) @ model.first.weight.abs(), "layer .first. is used"),
    "in a list": (lambda model, x: model.first(x) @ torch.cat([model.first.weight]), r"used by torch\.cat"),
    "in place": (clip, "is used by"),
    "fewer rows": (lambda model, x: model.first(x[:3]), r"got .* \[3, 3\], but the model got 8"),
    "chosen rows": (
        lambda model, x: x.index_put((x[:, 0] < 0,), model.second(model.first(x[x[:, 0] < 0]))),
        r"'first' got .* \[4, 3\], whose length depends on the values",
    ),
    "thread": (lambda model, x: model.second(in_thread(model.first, x)), "in another thread"),
    "thread and here": (
        lambda model, x: model.second(model.first(in_thread(model.first, x))), "linear in another thread"
    ),
    "compiled code": (
        lambda model, x: (
            model.second(model.first(x)) + torch.compile(product, backend="eager")(x, model.first.weight)
        ),
        "in compiled code or in a later call",
    ),
    **{
        f"bias changed by {label}": (changes_bias(change), f"parameter 'first' is changed by .*{label}")
        for label, change in {
            "add_": lambda bias: bias.__iadd__(1),
            "floor_divide_": lambda bias: bias.__ifloordiv__(2),
            "remainder_": lambda bias: bias.__imod__(2),
            "__setitem__": lambda bias: bias.__setitem__(0, 1.0),
            "relu": lambda bias: functional.relu(bias, inplace=True),
        }.items()
    },
    **{
        name: (run, "layer 'first', or a tensor that shares its memory, is used by aten")
        for name, run in {
            "scripted code": lambda model, x: (
                model.second(model.first(x)) + scripted_product(x, model.first.weight)
            ),
            "without torch functions": without_torch_functions,
            "caught error": catch,
            "kept tensor": lambda model, x: model.second(model.first(x)) @ model.kept[0],
            "plain tensor": lambda model, x: (
                model.second(model.first(x)) @ model.first.weight.as_subclass(Tensor)
            ),
            "dlpack": lambda model, x: (
                model.second(model.first(x)) @ from_dlpack(_to_dlpack(model.first.weight))
            ),
        }.items()
    },
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
    model.kept = [model.first.weight.data]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        check_members(population, population.sample(0))
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    model.run = RIGHT["in order"]
    check_members(population, population.sample(0))


def test_a_replaced_layer_is_refused_and_an_optional_one_may_be_left_out() -> None:
    """A forward must reach each layer that was perturbed, unless it is optional; a copy checks the same."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    population = perturb(model)
    model[0] = fill(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="did not use the perturbed layers 0: call perturb"):
        check_members(population, population.sample(0))

    perturb(Model(lambda model, x: model.first(x).argmax(-1)), optional=["second"]).verify(normal(8, 3))
    partial = perturb(Model(lambda model, x: model.first(x)), optional=["second"])
    check_members(partial, partial.sample(0))
    twin = copy.deepcopy(partial)
    check_members(twin, twin.sample(0))
    with pytest.raises(ValueError, match="optional='third' matches no module"):
        perturb(Model(lambda model, x: model.first(x)), optional=["third"])


class ActorCritic(nn.Module):
    """A trunk with two heads, without a forward; ``value`` has its rows in the second axis inside."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(5, 1)

    def act(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """Return the logits of actions."""
        y: Tensor = self.actor(self.trunk(x).tanh()) * scale
        return y

    def value(self, x: Tensor) -> Tensor:
        """Return the values of states."""
        y: Tensor = self.critic(self.trunk(torch.stack([x, -x])).tanh()).sum(0)
        return y

    def shuffled(self, x: Tensor) -> Tensor:
        """Return the logits in another order."""
        return self.act(x).flip(0)


@pytest.mark.parametrize("antithetic", [False, True])
def test_methods_of_a_model_see_the_same_members(antithetic: bool) -> None:
    """A call of a method has each member's weights, also of layers that only this method uses."""
    population, x = perturb(ActorCritic(), antithetic=antithetic), normal(8, 3)
    noise = population.sample(0)
    for _ in range(2):
        actions, values = (
            population.call("act", x, noise=noise, scale=2.0),
            population.call("value", x, noise=noise),
        )
        for row in range(8):
            weights = population.member(noise, row % 4, negated=antithetic and row >= 4)
            alone: Any = copy.deepcopy(population.model)
            alone.load_state_dict(weights)
            torch.testing.assert_close(actions[row], alone.act(x[row], 2.0).detach())
            torch.testing.assert_close(values[row], alone.value(x[row]).detach())
    population.verify(x, method="value")
    with pytest.raises(AttributeError, match="no attribute 'acts'"):
        population.call("acts", x, noise=noise)


def test_a_method_that_misses_a_layer_or_mixes_rows_is_refused() -> None:
    """A replaced layer is found in a call of a method, and so are mixed rows when it is verified."""
    model = ActorCritic()
    population = perturb(model)
    with pytest.raises(ValueError, match="must not mix or reorder rows"):
        population.verify(normal(8, 3), method="shuffled")
    model.actor = fill(nn.Linear(5, 4))
    with pytest.raises(ValueError, match="did not use the perturbed layers actor: call perturb"):
        population.call("act", normal(8, 3), noise=population.sample(0))


def test_a_weight_that_is_used_unlike_in_its_layer_is_refused() -> None:
    """A weight may not be that of a convolution with other groups, of one image, or of a normalization."""
    uses: list[tuple[nn.Module, Callable[[Any, Tensor], Tensor], str]] = [
        *(
            (
                layer,
                lambda layer, x: torch.stack([layer(row) for row in x[:, 0, 0]]),
                rf"{name}.* on an input of 1 axes",
            )
            for layer, name in ((nn.Linear(4, 4), "Linear"), (nn.LayerNorm(4), "ChannelAffine"))
        ),
        (
            nn.Conv2d(2, 4, 1, bias=False),
            lambda layer, x: functional.conv2d(x, layer.weight, groups=2),
            "groups=2.* of 4 axes",
        ),
        (
            nn.Conv2d(4, 4, 1),
            lambda layer, x: torch.stack([layer(row) for row in x]),
            r"Convolution.* of 3 axes",
        ),
        (
            nn.Linear(4, 4, bias=False),
            lambda layer, x: functional.layer_norm(x, (4, 4), layer.weight),
            "ChannelAffine.* of 4 axes",
        ),
    ]
    for layer, use, words in uses:
        population = perturb(Use(layer, use), impls.Flipped())
        with pytest.raises(ValueError, match=words):
            population(normal(4, 4, 4, 4), noise=population.sample(0))


class Use(nn.Module):
    """A model that uses one layer in a way of the test's choice."""

    def __init__(self, layer: nn.Module, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.use = layer, use

    def forward(self, x: Tensor) -> Tensor:
        """Use the layer."""
        return self.use(self.layer, x)


def force(model: Any, x: Tensor) -> Tensor:
    """Return the derivative of a row's energy with respect to the row."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = model.second(model.first(x).tanh()).square().sum()
        return torch.autograd.grad(energy, x)[0]


def network(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that the layers of a model compute."""
    return lambda x: model.second(model.first(x).tanh())


DERIVATIVES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "autograd": force,
    "grad": lambda model, x: torch.func.grad(lambda x: network(model)(x).square().sum())(x),
    "jvp": lambda model, x: torch.func.jvp(network(model), (x,), (torch.ones_like(x),))[1],
    "jacobian": lambda model, x: torch.func.jacrev(lambda x: network(model)(x).sum(0))(x).transpose(0, 1),
    "vmap": lambda model, x: torch.vmap(lambda scale: network(model)(scale * x), out_dims=1)(normal(3)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("run", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_model_may_differentiate_its_layers(run: Any) -> None:
    """A derivative inside a model is that of the written-out model, for each scheme."""
    for number, scheme in enumerate(PLAIN_SCHEMES):
        population = perturb(Model(run), scheme, antithetic=number % 2 == 0, warn=False)
        check_members(population, population.sample(0))
        assert all(parameter.grad is None for parameter in population.model.parameters())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(4, 3, bias=False), (4,)), (nn.Conv2d(2, 3, 2), (2, 3, 3))],
    ids=["linear", "conv"],
)
def test_rows_of_one_memory_have_derivatives_of_their_members(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    """An expanded row has the derivatives of copies of the row."""
    model = Use(fill(layer), lambda layer, x: torch.func.grad(lambda x: layer(x).square().sum())(x))
    population = perturb(model, impls.Perturbed())
    noise, x = population.sample(0), normal(1, *shape).expand(2 * population.members, *shape)
    torch.testing.assert_close(population(x, noise=noise), population(x.contiguous(), noise=noise))


class Tokens(nn.Module):
    """A layer, a table, a normalization and a module's own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.norm = nn.Embedding(7, 3), nn.Linear(3, 3), nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Read rows and a token of each."""
        y: Tensor = self.norm(self.layer(x) + self.table(tokens)) * self.scale
        return y


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_population_may_be_transformed_but_not_differentiated_backward() -> None:
    """The results of vmap and jvp of a population are right; grad, which would be 0, is refused."""
    x, tangent, tokens = normal(8, 3), normal(8, 3).flip(0), torch.arange(8) % 7
    for scheme in PLAIN_SCHEMES:
        if scheme.learns_from_rows:
            continue  # an Embedding has no such scheme
        population = perturb(Tokens(), scheme, warn=False)

        run = functools.partial(population, noise=population.sample(0))

        batch = torch.vmap(run)(torch.stack([x, 2 * x]), torch.stack([tokens, tokens.flip(0)]))
        torch.testing.assert_close(batch, torch.stack([run(x, tokens), run(2 * x, tokens.flip(0))]))
        derivative = torch.func.jvp(lambda x, run=run: run(x, tokens), (x,), (tangent,))[1]
        step = 1e-5
        expected = (run(x + step * tangent, tokens) - run(x - step * tangent, tokens)) / (2 * step)
        torch.testing.assert_close(derivative, expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match=r"torch\.func\.grad of its output would be 0"):
            torch.func.grad(lambda x, run=run: run(x, tokens).sum())(x)


def test_another_branch_in_a_later_call_is_checked() -> None:
    """A later call with the same shapes is checked like the first."""
    branches: dict[str, Callable[[Any, Tensor], Tensor]] = {
        "layer 'first', or a tensor that shares its memory": REFUSED["scripted code"][0],
        "itself does not use its weight": lambda model, x: model.second(
            functional.conv_transpose1d(x.unsqueeze(2), model.first.weight, model.first.bias).squeeze(2)
        ),
        "took another branch": lambda model, x: model.second(
            model.first(x) + model.first(normal(8, 3)).mean(0)
        ),
        "did not use": lambda model, x: model.first(x),
    }
    for words, run in branches.items():
        model = Model(RIGHT["in order"])
        population = perturb(model)
        noise = population.sample(0)
        for _ in range(3):
            population(normal(8, 3), noise=noise)
        model.run = run
        with pytest.raises(ValueError, match=words):
            population(normal(8, 3), noise=noise)


def test_a_compiled_function_is_compiled_once() -> None:
    """A compiled function without weights is compiled for guarded calls and for others, not in each call."""
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:  # noqa: ARG001  torch's arguments
        graphs.append(graph)
        return graph.forward

    activation = torch.compile(lambda x: x.tanh() * 2, backend=backend)
    population = perturb(Model(lambda model, x: model.second(activation(model.first(x)))))
    counts = []
    for step in range(8):
        with torch.no_grad():
            check_members(population, population.sample(step))
        counts.append(len(graphs))
    assert counts[3] == counts[7]


def test_a_renamed_layer_has_no_written_out_member() -> None:
    """member() refuses a model in which a layer has another name, as load_state_dict() would leave it out."""
    model = nn.Sequential(nn.Linear(3, 3))
    population = perturb(model)
    noise = population.sample(0)
    model[0] = nn.Sequential(model[0])
    with pytest.raises(ValueError, match=r"no parameter '0\.bias' any more"):
        population.member(noise, 0)


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
    model = nn.ModuleDict(
        {"body": nn.Linear(3, 3), "head": nn.Sequential(nn.Linear(3, 3)), "header": nn.PReLU()}
    )
    population = perturb(model, exclude=["head", "header"])
    assert [layer.name for layer in population.layers] == ["body"]
    layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(11)))
    with pytest.raises(ValueError, match=r"exclude must be a list of patterns, got '10': pass \['10'\]"):
        perturb(layers, exclude="10")
    assert len(perturb(layers, exclude=["10"]).layers) == 10


def shift(parameter: nn.Parameter) -> None:
    """Change a parameter in place, as optimizers do."""
    with torch.no_grad():
        parameter.add_(0.25)


def replace_data(parameter: nn.Parameter) -> None:
    """Replace a parameter's data."""
    parameter.data = parameter.data + 0.25


def shift_data(parameter: nn.Parameter) -> None:
    """Change a parameter's data in place, which torch does not count."""
    parameter.data += 0.25


@pytest.mark.parametrize("move", [shift, replace_data, shift_data])
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
                population.update(noise, torch.ones(4)) if move is shift_data else population(x, noise=noise)
            assert population.layers[0].weight.grad is None
            noise = population.sample(0)
        y = population(x, noise=noise)
        for row in () if scheme.draws_binary_weights else range(8):
            expected = torch.func.functional_call(layer, population.member(noise, row % 4), (x[row],))
            torch.testing.assert_close(y[row], expected, rtol=1e-9, atol=1e-11, msg=str(scheme))


@pytest.mark.parametrize("antithetic", [False, True])
def test_rows_and_fitness_belong_to_their_members(antithetic: bool) -> None:
    """rows() shows each input to each member, and fitness() is the mean of its rows."""
    population = perturb(nn.Linear(3, 1), antithetic=antithetic)
    noise, inputs = population.sample(0), normal(6, 3)
    fitness = population.fitness(population(population.rows(inputs), noise=noise).squeeze(1), noise)
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


FIRST_LAYERS: dict[str, tuple[Callable[[], nn.Module], Sequence[int]]] = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "one input": (lambda: nn.Linear(1, 4, bias=False), (1,)),
    "tokens": (lambda: nn.Linear(3, 4), (2, 3)),
    "convolution": (lambda: nn.Conv2d(2, 4, 3, padding=1, stride=2), (2, 5, 5)),
    "one channel": (lambda: nn.Conv2d(2, 1, 3), (2, 5, 5)),
    "groups": (lambda: nn.Conv1d(4, 2, 2, groups=2), (4, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 4, 2), (2, 3, 3)),
    "normalization": (lambda: nn.LayerNorm(3), (3,)),
}


@pytest.mark.parametrize("label", FIRST_LAYERS)
@pytest.mark.parametrize("antithetic", [False, True])
def test_equal_rows_are_computed_once(label: str, antithetic: bool) -> None:
    """A layer that gets the result of rows() itself computes what it would for a copy of it."""
    make, shape = FIRST_LAYERS[label]
    inputs = normal(5, *shape)
    for scheme in PLAIN_SCHEMES:
        layer = fill(make())
        if scheme.why_unsupported(layer) or (antithetic and not scheme.supports_antithetic):
            continue
        try:
            population = impls.perturb(layer, scheme, members=6, sigma=0.5, antithetic=antithetic, warn=False)
        except UnsupportedError:
            continue
        noise, rows = population.sample(0), population.rows(inputs)
        results = (population(x, noise=noise) for x in (rows, rows.clone()))
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12, msg=str(scheme))


def test_equal_rows_save_work() -> None:
    """Products with the weight that all members share are computed for the batch alone."""
    # The counter does not see sums of elementwise products, so the rank is not 1.
    for scheme in (impls.LowRank(rank=2), impls.SparsePerturbed(k=1), impls.Hadamard()):
        population = impls.perturb(fill(nn.Linear(32, 32)), scheme, members=64, sigma=0.5)
        noise, rows = population.sample(0), population.rows(normal(2, 32))
        flops = []
        for x in (rows, rows.clone()):
            population(x, noise=noise)  # the first call looks for the axes of rows
            with FlopCounterMode(display=False) as counter:
                population(x, noise=noise)
            flops.append(counter.get_total_flops())
        assert flops[1] - flops[0] >= 2 * 32 * 32 * (len(rows) - 2), scheme


def test_rows_that_were_changed_are_not_taken_for_the_batch() -> None:
    """Members see rows that were changed after rows(), and those of another number of members."""
    population = perturb_layer(scheme=impls.LowRank(rank=1), stream="philox")
    noise, inputs = population.sample(0), normal(2, 6).float()
    for _ in range(4):  # every call, guarded or not
        rows = population.rows(inputs)
        inputs += 1
        torch.testing.assert_close(population(rows, noise=noise), population(rows.clone(), noise=noise))
        rows[1] += 1  # member 1 of the first repeat
        torch.testing.assert_close(population(rows, noise=noise), population(rows.clone(), noise=noise))
    part = population.sample(0, range(2))
    rows = population.rows(inputs)
    torch.testing.assert_close(population(rows, noise=part), population(rows.clone(), noise=part))
    population = perturb_layer(scheme=impls.LowRank(rank=1))
    rows = population.rows(torch.full((2, 6), torch.nan))
    assert population(rows, noise=population.sample(0)).isnan().all()
    rows.numpy()[1] = 0
    with pytest.raises(ValueError, match=r"rows\(\) was changed by .data or NumPy"):
        population(rows, noise=population.sample(0))


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


WRONG: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "reordered rows": lambda model, x: model.second(model.first(x).flip(0)),
    "mixed rows": lambda model, x: model.second(model.first(x) - x.mean(0)),
    "random numbers": lambda model, x: model.second(functional.dropout(model.first(x))),
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
    layer = nn.Linear(3, 3)
    population = perturb(nn.Sequential(layer, nn.Tanh(), layer))
    weight, before = layer.weight, layer.weight.detach().clone()
    population.verify(normal(8, 3))
    assert layer.weight is weight
    assert torch.equal(weight, before)
    perturb(Model(lambda model, x: {"y": (model.first(model.second(x)), 1)})).verify(normal(8, 3))  # type: ignore[arg-type, return-value]  # other outputs
    x, infinity = normal(8, 3), math.inf
    perturb(Model(lambda model, x: model.first(model.second(x)).masked_fill(x > 0, -infinity))).verify(x)
    mixed = perturb(Model(lambda model, x: model.first(model.second(x)).masked_fill(x.flip(0) > 0, infinity)))
    with pytest.raises(ValueError, match=r"row \d \(repeat \d, member \d\) differs"):
        mixed.verify(x)
    with pytest.raises(
        ValueError, match="row 0 is not a number in the plain model with the weights of member"
    ):
        population.verify(math.nan * x)
    with pytest.raises(ValueError, match=r"verify compares rows, but the model returned shape \[\]"):
        perturb(Model(lambda model, x: model.first(model.second(x)).sum())).verify(normal(8, 3))


def test_rows_and_utilities_of_another_length_are_refused() -> None:
    """Wrong numbers of rows or utilities, and utilities that are not finite, raise and leave .grad alone."""
    population, antithetic = perturb_layer(), perturb_layer(antithetic=True)
    noise = population.sample(0)
    for count in (6, 0):
        with pytest.raises(ValueError, match=rf"{count} rows is not a multiple of 4 members"):
            population(torch.zeros(count, 6), noise=noise)
    with pytest.raises(ValueError, match=r"even number of repeats, got 3 \(12 rows, 4 members\)"):
        antithetic(torch.zeros(12, 6), noise=antithetic.sample(0))
    for each in (population, antithetic):
        with pytest.raises(ValueError, match="5 utilities for 4 members"):
            each.update(each.sample(0), torch.zeros(5))
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="1 of 4 utilities"):
            population.update(noise, torch.tensor([0.0, 1.0, value, 2.0]))
    assert all(parameter.grad is None for parameter in population.model.parameters())


def test_numbers_out_of_range_are_refused() -> None:
    """An error for a number out of range names the argument and shows the value."""
    for sigma in (0, -0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"sigma must be a number above 0, got {sigma}"):
            perturb_layer(sigma=sigma)
    for members in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=f"members must be an int of at least 1, got {members}"):
            perturb_layer(members=members)
    with pytest.raises(ValueError, match="rows_axis must be 0 or 1, got 2"):
        perturb_layer(rows_axis=2)
    no_integers: list[Any] = [-1, 1.5, "a", None, True]
    for value in no_integers:
        with pytest.raises(ValueError, match="step must be an integer of 0 or more, got"):
            perturb_layer().sample(value)
        with pytest.raises(ValueError, match="seed must be an integer of 0 or more, got"):
            perturb_layer(seed=value)
    for part in (range(1, 4), range(0), range(5), range(3), range(-256, 4), range(0, 4, 2)):
        with pytest.raises(ValueError, match="is not a valid part of a population of 4"):
            perturb_layer().sample(0, part)
    population = perturb_layer()
    for member in (-1, 4):
        with pytest.raises(
            IndexError, match=f"member {member} is not in this noise of 4 members: pass 0 to 3"
        ):
            population.member(population.sample(0), member)


OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    *((impls.Permuted, {"in_sparsity": bad}, f"in_sparsity must be a number above 0 .*got {bad!r}")
      for bad in (0.0, 1.5, float("nan"), True, "0.5")),
    (impls.Permuted, {"out_sparsity": 0.5}, "out_sparsity=0.5 has no effect with side='in'"),
    (impls.Flipped, {"side": "up"}, "side must be 'in', 'out' or 'both', got 'up'"),
    (impls.Flipped, {"cores": 0}, "cores must be an int of at least 1, got 0"),
    (impls.Perturbed, {"stored": "up"}, "got 'up'"),
    (impls.SparsePerturbed, {"k": 0}, "k must be an int of at least 1, got 0"),
    (impls.SparsePerturbed, {"k": 1, "values": "signs"}, "values must be 'normal' or 'sign', got 'signs'"),
    *((impls.LowRank, {"rank": bad}, f"rank must be an int of at least 1, got {bad!r}")
      for bad in (0, True, 1.0, "1")),
    (impls.NoiseTable, {"ratio": 1}, "ratio must be an int of at least 2, got 1"),
    *((scheme, {"p": bad}, "p must be a number between 0 and 1")
      for scheme in (impls.DropoutMask, impls.DropConnect, impls.DropoutBlocks)
      for bad in (0, 1, float("nan"))),
    (impls.DropoutMask, {"side": "both"}, "side must be 'in' or 'out', got 'both'"),
    (impls.DropoutBlocks, {"groups": 1}, "groups must be an int of at least 2, got 1"),
    *((perturb_layer, {"scheme": scheme}, words) for scheme, words in (
        (impls.SparsePerturbed(7), "k = 7 exceeds the layer's 6 input channels per group"),
        (impls.DropoutBlocks(0.1, blocks=1), "p = 0.1 keeps none or all of 1 blocks: use p = 0.5"),
        (impls.Perturbed, "must be an instance"),
        ({"up": impls.Perturbed(), "*": impls.Flipped()}, "'up' matches no layer"),
        ({"up": impls.Perturbed()}, "no pattern matches the layers"),
    )),
    (impls.perturb, {"model": nn.LayerNorm(3), "scheme": {}, "members": 4, "sigma": 0.1},
     "no pattern matches the layers the model itself"),
    (impls.perturb, {"model": nn.ReLU(), "scheme": impls.Perturbed(), "members": 4, "sigma": 0.1},
     "nothing to perturb: every parameter of ReLU is frozen or excluded"),
    (perturb_layer, {"exclude": ["up"]}, "'up' matches no module"),
]  # fmt: skip
"""What is created, its options, and a pattern of the error message."""


def test_options_out_of_range_are_refused() -> None:
    """An option out of range raises when the scheme is created, or, for a layer's width, its population."""
    for make, options, words in OPTIONS:
        with pytest.raises(ValueError, match=words):
            make(**options)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_unsupported_layers_are_named_unless_excluded() -> None:
    """Layers with an option that cannot be perturbed are refused by name unless they are excluded.

    Scripted code, and layers that share a weight but not a bias, are refused too.
    """
    layers = {
        "words": nn.Embedding(3, 2, max_norm=1.0),
        "bag": nn.EmbeddingBag(3, 2),
        "norm": nn.utils.spectral_norm(nn.Linear(2, 2)),
        "memory": nn.utils.parametrizations.weight_norm(nn.LSTM(2, 2), "weight_hh_l0"),
        "head": nn.Linear(2, 2),
    }
    model = nn.ModuleDict(layers)
    words = (
        r"words \(Embedding with max_norm\), bag \(EmbeddingBag\), "
        r"norm \(Linear with a hook that computes its weight: use torch.nn.utils.parametrizations\), "
        r"memory \(ParametrizedLSTM with a weight that is computed from other parameters\)"
    )
    with pytest.raises(ValueError, match=words):
        perturb(model)
    population = perturb(model, exclude=["words", "bag", "norm", "memory"])
    assert set(population.perturbation(population.sample(0), 0)) == {"head.weight", "head.bias"}
    # TorchScript calls layer functions that torch's function mode does not see.
    with pytest.raises(ValueError, match="scripted code cannot be perturbed"):
        perturb(nn.Sequential(torch.jit.script(nn.Linear(2, 2))))
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="0 and 1 share a weight but not their bias"):
        perturb(tied)


def test_noise_of_another_population_or_parameter_is_refused() -> None:
    """Noise of another population, or from before a parameter was replaced, is refused."""
    population, noise = perturb_layer(), perturb_layer().sample(0)
    for call in (
        lambda: population(torch.zeros(4, 6), noise=noise),
        lambda: population.update(noise, torch.zeros(4)),
    ):
        with pytest.raises(ValueError, match="drawn by another population"):
            call()
    with pytest.raises(TypeError, match=r"noise must be what sample\(\) returned, got Tensor"):
        population.update(torch.zeros(4), noise)  # type: ignore[arg-type]  # in the wrong order
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    replaced = perturb(model)
    earlier = replaced.sample(0)
    model[1].weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match="of layer '1' was replaced"):
        replaced(normal(4, 3), noise=earlier)


def test_batch_statistics_across_the_population_are_refused() -> None:
    """BatchNorm in training mode is refused, because its statistics would mix members."""
    for affine in (True, False):
        population = perturb(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=affine)))
        with pytest.raises(ValueError, match="across the population"):
            population(normal(4, 3), noise=population.sample(0))
