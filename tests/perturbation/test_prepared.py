"""A prepared forward computes what a call of the population does, for other inputs and other noise too."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import impls
from tests.perturbation.test_models import MEMBERS, MODELS, ROWS, SCHEMES, TwoInputs, tokens
from tests.scheme_cases import fill, normal

STORED = {name: scheme for name, scheme in SCHEMES.items() if "regenerated" not in name}
SIMILAR = {"LSTM", "GRU", "RNN", "TransformerEncoder", "language model", "time before rows"}
"""Models whose functions the other models call too."""
LIMITS = [
    f"impls.perturbation.guarded_mode.{name}" for name in ("WRITTEN_OUT_BYTES", "WRITTEN_OUT_BYTES_OF_DENSE")
]
TRACED = [name for name in MODELS if name not in SIMILAR]


def population_of(model: nn.Module, scheme: Any = STORED["dense"], **options: Any) -> impls.Population:
    """Return a population of a model with random weights."""
    return impls.perturb(
        fill(model.double().eval()), scheme, members=MEMBERS, sigma=0.1, warn=False, **options
    )


def check_equal(a: object, b: object) -> None:
    """Check that two outputs are equal."""
    for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("number", "name"), [*enumerate(TRACED)])
def test_models_and_schemes(number: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is traced once; later noise, inputs and changed weights give the numbers of a call.

    Tracing takes a while, so each model has only one of the schemes. Every other model writes no weights out.
    """
    if number // 2 % 2:
        for limit in LIMITS:
            monkeypatch.setattr(limit, 0)
    schemes = itertools.cycle(STORED.values())
    model, x = MODELS[name]()
    scheme = next(itertools.islice(schemes, number, None))
    population = population_of(model, scheme, antithetic=number % 2 == 0)
    check_prepared(population, x, monkeypatch)


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("scheme", STORED.values(), ids=STORED)
def test_schemes(scheme: Any, antithetic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scheme on a linear layer: with its own product, and with the weights of a small layer."""
    for limit in (0, MEMBERS * (2 if antithetic else 1) * 12 * 8):
        with monkeypatch.context() as patch:
            for path in LIMITS:
                patch.setattr(path, limit)
            population, x = population_of(nn.Linear(4, 3), scheme, antithetic=antithetic), normal(ROWS, 4)
            check_prepared(population, x, patch)
        operations = [node.name for node in population.traces[0].recorded.graph.nodes]
        assert ("baddbmm" in operations) == (limit > 0)  # the product with all weights and biases


class ReadsAgain(nn.Module):
    """Reads the inputs of elementwise functions again, by views too; one is only the end of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.layer(x)
        late = self.layer(y)
        early = late.view(2, -1)[0]
        summed = torch.relu(late) * torch.tanh(y)
        shifted = summed + summed[:1]
        first, _ = torch.unsafe_chunk(shifted, 2)  # views, though its schema does not say so
        gate = self.layer(shifted * 2)
        end = torch.tanh(self.layer(gate)[2:])[:, 1:]
        return y, early, first * 2, torch.sigmoid(gate) * gate, late.mean(0) + late, end


class ReadsInputLast(nn.Linear):
    """Returns a function of its input, too."""

    @override
    def forward(self, input: Tensor) -> Any:  # the name in torch
        return super().forward(input), torch.relu(input)


def test_values_that_are_read_again_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are the inputs."""
    x = normal(ROWS, 4)
    given = x.clone()
    for model in (ReadsAgain(), ReadsInputLast(4, 4)):
        with monkeypatch.context() as patch:
            check_prepared(population_of(model, STORED["low rank"]), x, patch)
    check_equal(x, given)


def test_large_activations_are_overwritten() -> None:
    """A layer and its activation need memory for the product and the correction, and for flipped inputs."""
    results: list[Tensor] = []  # kept, so that no two of them get the same memory

    class Recording(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it without hints

        @override
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **kwargs or {})
            results.append(result)
            return result

    x = normal(ROWS, 64, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    population = population_of(model, impls.Flipped())
    forward = population.prepare(population.sample(0), x)
    with Recording():
        forward(x)
    addresses = {y.data_ptr() for y in results if y.numel() == x.numel()} - {x.data_ptr()}
    assert len(addresses) == 3


def test_narrow_dtypes_are_not_written_out() -> None:
    """The noise may be less than a rounding of the weight."""
    population = population_of(nn.Linear(4, 3))
    weight = population.model.bfloat16().get_parameter("weight")
    weight.data += 256
    noise, x = population.sample(0), normal(ROWS, 4).bfloat16()
    check_equal(population.prepare(noise, x)(x), population(x, noise=noise))


def check_prepared(population: impls.Population, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a prepared forward over three steps with changed weights, of which the first one traces."""
    for step in range(3):
        noise = population.sample(step)
        forward = population.prepare(noise, x)
        for rows in (x, x.flip(0)):
            check_equal(forward(rows), population(rows, noise=noise))
        monkeypatch.setattr("impls.perturbation.prepared.trace", None)
        with torch.no_grad():
            for parameter in population.model.parameters():
                parameter.mul_(0.9)


def test_keywords_nesting_and_rows_in_the_middle_of_memory() -> None:
    """Arguments may be nested and named; rows need not be the start of their memory or contiguous."""
    population = population_of(TwoInputs())
    inputs = {"tokens": tokens(), "padding": torch.zeros(ROWS, 3, dtype=torch.bool)}
    noise, memory = population.sample(0), normal(ROWS, 3, 4)
    forward = population.prepare(noise, inputs, memory=memory)
    check_equal(forward(inputs, memory=memory), population(inputs, memory=memory, noise=noise))

    population = population_of(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    noise, x = population.sample(0), normal(3 * ROWS, 4)
    for rows in (x[:ROWS], x[ROWS : 2 * ROWS], normal(4, ROWS).T, nn.Parameter(normal(ROWS, 4))):
        forward = population.prepare(noise, rows)
        for each in (rows, x[2 * ROWS :]):
            y = forward(each)
            check_equal(y, population(each, noise=noise))
            assert not y.requires_grad


class CheckedByTorch(nn.Module):
    """A causal decoder and a distribution, for which torch reads the values of a mask and of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the entropy of each position of [rows, positions, 4]."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.decoder(x, x.flip(1), tgt_mask=mask)
        return torch.distributions.Categorical(logits=y).entropy()


def test_checks_of_values_in_torch_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are back after the recording."""
    # The first torch.compile of a process turns them off.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    check_prepared(population_of(CheckedByTorch()), normal(ROWS, 5, 4), monkeypatch)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Categorical(probs=torch.tensor([-1.0, 2.0]))


class Branching(nn.Linear):
    """A layer that looks at numbers."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Compute another function of rows with a large sum."""
        y = super().forward(input)
        return y if y.sum() > 0 else -y


class Remembering(nn.Linear):
    """A layer that stores its last output."""

    last: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Add the last output."""
        y = super().forward(input)
        self.last = y if self.last is None else y + self.last
        return self.last


@dataclass
class Output:
    """An output that is no tuple, list or dictionary."""

    y: Tensor


class Wrapping(nn.Linear):
    """A layer that returns an object."""

    def forward(self, input: Tensor) -> Output:  # type: ignore[override]  # noqa: A002  on purpose; torch's name
        """Wrap the output."""
        return Output(super().forward(input))


class Counting(nn.Linear):
    """A layer whose result depends on a counter outside of the model."""

    calls = [0]  # noqa: RUF012  of the class, on purpose

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  torch's name
        """Multiply by the number of calls."""
        self.calls[0] += 1
        return super().forward(input) * self.calls[0]


@pytest.mark.parametrize(
    ("make", "scheme", "words"),
    [
        (Branching, "dense", r"line \d+: return y if y.sum\(\) > 0 .* control flow that depends on values"),
        (Remembering, "dense", "stores last in its modules"),
        (Counting, "dense", "have another result"),
        (Wrapping, "dense", "the model returned Output: return tensors in tuples"),
        (nn.Linear, "regenerated", "drawn again in each call"),
    ],
)
def test_a_forward_that_cannot_be_prepared_is_refused(
    make: Callable[..., nn.Module], scheme: str, words: str
) -> None:
    """The population itself evaluates it before and after."""
    population = population_of(make(4, 3), SCHEMES[scheme])
    noise, x = population.sample(0), normal(ROWS, 4)
    with pytest.raises(ValueError, match=words):
        population.prepare(noise, x)
    y = population(x, noise=noise)
    assert (y.y if isinstance(y, Output) else y).shape == (ROWS, 3)


def test_later_calls_with_other_shapes_or_changed_weights_are_refused() -> None:
    """So are other keyword values, another number of tensors, and noise of another population."""
    population = population_of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    noise, x = population.sample(0), normal(ROWS, 4)
    forward = population.prepare(noise, x)
    population(x[:4], noise=noise)  # new shapes are checked, which changes no buffer
    check_equal(forward(x), population(x, noise=noise))
    for wrong, words in (
        ((x[:4],), "call prepare"),
        ((x.float(),), "call prepare"),
        ((x, x), "got 2 tensors"),
        (([x],), "call prepare"),
        (({"x": x}, x), "got 2 tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            forward(*wrong)
    with torch.no_grad():
        next(population.model.buffers()).add_(1)
    with pytest.raises(ValueError, match="a weight has changed"):
        forward(x)
    forward = population.prepare(noise, x)
    check_equal(forward(x), population(x, noise=noise))
    weight = population.model.get_parameter("0.weight")
    weight.data = 2 * weight.data  # torch does not count this change
    with pytest.raises(ValueError, match="a weight has changed"):
        forward(x)
    population.sigma *= 2
    with pytest.raises(ValueError, match=r"sigma was changed from 0.1 to 0.2 after sample\(\): call sample"):
        population.prepare(noise, x)
    noise = population.sample(0)
    forward = population.prepare(noise, x)
    check_equal(forward(x), population(x, noise=noise))
    population.sigma /= 2
    with pytest.raises(ValueError, match=r"sigma was changed from 0.2 to 0.1 after sample\(\): call sample"):
        forward(x)
    with pytest.raises(ValueError, match="another population"):
        population_of(nn.Linear(4, 3)).prepare(noise, x)


def test_autocast_is_that_of_each_prepare() -> None:
    """A record made in autocast is not that of a forward outside of it."""
    population = population_of(nn.Linear(4, 3))
    population.model.float()
    noise, x = population.sample(0), normal(ROWS, 4).float()
    for is_enabled in (False, True, False):
        with torch.autocast("cpu", enabled=is_enabled):
            y = population.prepare(noise, x)(x)
            assert y.dtype == (torch.bfloat16 if is_enabled else torch.float32)
            expected = population(x, noise=noise)
            if is_enabled:
                check_equal(y, expected)
            else:  # written-out weights are rounded to float32
                torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("makes", [False, True], ids=["trained outside", "made inside"])
@pytest.mark.parametrize("calls", [False, True], ids=["called outside", "called inside"])
def test_models_and_calls_of_inference_mode_are_prepared(makes: bool, calls: bool) -> None:
    """Tensors made in inference mode have no count of their changes."""
    with torch.inference_mode(makes):
        population = population_of(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    with torch.inference_mode(calls):
        x = normal(ROWS, 4)
        for step in range(2):
            noise = population.sample(step)
            check_equal(population.prepare(noise, x)(x), population(x, noise=noise))


def test_random_numbers_of_a_model_are_new_in_each_call() -> None:
    """Dropout is not frozen, and its noise does not change that of the population."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5))
    population = population_of(model)
    model.train()
    noise, x = population.sample(0), normal(ROWS, 4)
    forward = population.prepare(noise, x)
    first, second = forward(x), forward(x)
    assert not torch.equal(first == 0, second == 0)
    model.eval()
    check_equal(first, torch.where(first == 0, 0.0, 2 * population(x, noise=noise)))
    check_equal(population.prepare(noise, x)(x), population(x, noise=noise))  # traced again

    class AddsNumbers(nn.Linear):
        @override
        def forward(self, input: Tensor) -> Tensor:  # the name in torch
            return super().forward(input) + torch.rand(3)

    population = population_of(AddsNumbers(4, 3))
    forward = population.prepare(population.sample(0), x)
    change = forward(x) - forward(x)
    assert 0 < change.abs().max() < 1
    check_equal(change, change[:1].expand_as(change))  # the same three numbers for each row
