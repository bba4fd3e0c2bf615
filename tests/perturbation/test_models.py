"""Modules of torch and small models: each member computes what its own model computes."""

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import impls
from tests.scheme_cases import fill, normal

MEMBERS, ROWS, TOKENS = 4, 8, 11
SCHEMES: dict[str, Any] = {
    "dense": impls.Perturbed(),
    "stored weights": impls.Perturbed("weights"),
    "regenerated": impls.Regenerated(),
    "low rank": impls.LowRank(2),
    "low rank, regenerated": impls.LowRank(1, regenerated=True),
    "orthogonal": impls.Orthogonal(),
    "sparse": impls.SparsePerturbed(2),
    "permuted": impls.Permuted(in_sparsity=0.5),
    "permuted outputs": impls.Permuted("out"),
    "flipped": impls.Flipped("both"),
    "Hadamard": impls.Hadamard(),
}


class Normalized(nn.Module):
    """Parameters of a module's own: positions, a scale of channels, a scalar and the slope of a PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.scale = nn.Parameter(torch.zeros(1, 5, 4)), nn.Parameter(torch.ones(4))
        self.temperature, self.slope = nn.Parameter(torch.ones(())), nn.PReLU(5)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize rows [rows, 5, 4]."""
        x = x + self.positions
        y: Tensor = self.slope(self.scale * x * x.square().mean(-1, keepdim=True).rsqrt())
        return 1 - y / self.temperature


class Language(nn.Module):
    """A causal transformer over tokens, whose head may share the table of its embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.head, self.embedding = nn.Linear(4, TOKENS, bias=False), nn.Embedding(TOKENS, 4)
        if tied:
            self.head.weight = self.embedding.weight
        self.block = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, positions, tokens]."""
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y: Tensor = self.head(self.block(x, src_mask=mask, is_causal=True))
        return y


class PositionsFirst(nn.Module):
    """Attention and a recurrent layer on [positions, rows, features] inside of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.memory = nn.TransformerEncoderLayer(4, 2, 8), nn.LSTM(4, 3, bidirectional=True)
        self.attention = nn.MultiheadAttention(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs and attention weights of each row as a vector."""
        x, _ = self.memory(self.encoder(x.transpose(0, 1)))
        y, weights = self.attention(x, x[:2], 2 * x[:2], key_padding_mask=x[:2, :, 0].T > 0.1)
        return torch.cat([y.transpose(0, 1).flatten(1), weights.flatten(1)], 1)


class TwoInputs(nn.Module):
    """A decoder that reads tokens and a memory given by name, and returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 4, padding_idx=3)
        self.decoder = nn.TransformerDecoderLayer(4, 2, 8, batch_first=True)

    def forward(self, inputs: dict[str, Tensor], *, memory: Tensor) -> dict[str, Any]:
        """Decode."""
        y = self.decoder(self.embedding(inputs["tokens"]), memory, memory_key_padding_mask=inputs["padding"])
        return {"decoded": (y, len(y))}


def tokens() -> Tensor:
    """Return tokens [rows, positions]."""
    return torch.randint(TOKENS, (ROWS, 5), generator=torch.Generator().manual_seed(1))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "Conv1d": lambda: (nn.Conv1d(4, 6, 3, padding=1, groups=2), normal(ROWS, 4, 7)),
    "Conv3d": lambda: (nn.Conv3d(2, 3, 2, stride=2), normal(ROWS, 2, 4, 4, 4)),
    "ConvTranspose1d": lambda: (
        nn.ConvTranspose1d(4, 6, 3, groups=2, stride=2, output_padding=1), normal(ROWS, 4, 5)
    ),
    "ConvTranspose2d": lambda: (nn.ConvTranspose2d(4, 6, 3, padding=1, dilation=2), normal(ROWS, 4, 5, 5)),
    "ConvTranspose3d": lambda: (nn.ConvTranspose3d(2, 3, 2, bias=False), normal(ROWS, 2, 3, 3, 3)),
    "Embedding": lambda: (nn.Embedding(TOKENS, 4), tokens()),
    "Embedding of single tokens": lambda: (nn.Embedding(TOKENS, 4), tokens()[:, 0]),
    "Embedding with padding": lambda: (nn.Embedding(TOKENS, 4, padding_idx=3), tokens()),
    "LSTM": lambda: (nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), normal(ROWS, 6, 4)),
    "GRU": lambda: (nn.GRU(4, 5, 2, batch_first=True), normal(ROWS, 6, 4)),
    "RNN": lambda: (nn.RNN(4, 5, batch_first=True, bias=False, nonlinearity="relu"), normal(ROWS, 6, 4)),
    "LSTMCell": lambda: (nn.LSTMCell(4, 5), normal(ROWS, 4)),
    "GRUCell": lambda: (nn.GRUCell(4, 5), normal(ROWS, 4)),
    "RNNCell": lambda: (nn.RNNCell(4, 5), normal(ROWS, 4)),
    "MultiheadAttention": lambda: (Attention(), normal(ROWS, 6, 4)),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), normal(ROWS, 6, 4)
    ),
    "positions first": lambda: (PositionsFirst(), normal(ROWS, 5, 4)),
    "own parameters": lambda: (Normalized(), normal(ROWS, 5, 4)),
    "language model": lambda: (Language(tied=False), tokens()),
    "tied language model": lambda: (Language(tied=True), tokens()),
}  # fmt: skip


class Attention(nn.MultiheadAttention):
    """Attention of rows to themselves; a row is [positions, features]."""

    def __init__(self) -> None:
        super().__init__(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # one argument
        """Return outputs and the attention weights of each head."""
        y, weights = super().forward(x, x, x, average_attn_weights=False)
        assert weights is not None
        return y, weights


def first(outputs: Any) -> Tensor:
    """Return the first tensor that a module returns."""
    y: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return y


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_each_member_is_its_own_model(make: Any) -> None:
    """Rows equal those of the plain model with the member's weights; the update is the sum over members."""
    for (label, scheme), antithetic in itertools.product(SCHEMES.items(), (False, True)):
        model, x = make()
        fill(model.eval())
        options = {"members": MEMBERS, "sigma": 0.3, "antithetic": antithetic}
        population = impls.perturb(model, scheme, **options, warn=False)
        noise = population.sample(7)
        y = first(population(x, noise=noise))
        assert torch.equal(first(population(x, noise=noise)), y)  # the first call has more checks
        expected = []
        for row in range(ROWS):
            negated = antithetic and row >= ROWS // 2
            alone = copy.deepcopy(model)
            alone.load_state_dict(population.member(noise, row % MEMBERS, negated=negated), strict=False)
            expected.append(first(alone(x[row : row + 1]))[0].detach())
        torch.testing.assert_close(y, torch.stack(expected), rtol=1e-12, atol=1e-12, msg=label)
        utilities = normal(2, MEMBERS) if antithetic else normal(MEMBERS)
        population.update(noise, utilities)
        each = utilities[0] - utilities[1] if antithetic else utilities
        for name, values in population.dense_noise(noise).items():
            gradient = -torch.tensordot(each, values, 1) / (MEMBERS * (1 + antithetic) * 0.3)
            torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-12, atol=1e-12)


def test_models_may_take_several_inputs_by_position_and_name() -> None:
    """The first tensor has the rows; verify() compares all outputs that have them."""
    model = fill(TwoInputs().eval())
    population = impls.perturb(model, impls.LowRank(1), members=MEMBERS, sigma=0.3)
    inputs = {"tokens": tokens(), "padding": tokens()[:, :3] == 0}
    population.verify(inputs, memory=normal(ROWS, 3, 4))
    noise = population.sample(0)
    assert not population.perturbation(noise, 0)["embedding.weight"][3].any()  # padding is not perturbed
    with pytest.raises(ValueError, match="the model got no tensor"):
        population(1, noise=noise)


class Positions(nn.Module):
    """A table of positions that is read without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Add a vector to each position."""
        return x + self.table(torch.arange(x.shape[1]))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], object], str]] = {
    **{
        f"packed sequence for {layer.__name__}": (
            functools.partial(layer, 4, 4),
            lambda: nn.utils.rnn.pack_sequence([normal(3, 4)] * ROWS),
            "a packed sequence mixes the rows",
        )
        for layer in (nn.GRU, nn.LSTM)
    },
    "positions": (Positions, lambda: normal(ROWS, 5, 4), r"shape \[5\], but the model got 8 rows"),
}


@pytest.mark.parametrize(("make", "inputs", "words"), REFUSED.values(), ids=REFUSED)
def test_uses_without_rows_are_refused(make: Any, inputs: Any, words: str) -> None:
    """A use whose result would not be that of each member is an error that says what to do."""
    population = impls.perturb(fill(make()), impls.Perturbed(), members=MEMBERS, sigma=0.3)
    with pytest.raises(ValueError, match=words):
        population(inputs(), noise=population.sample(0))


def test_a_tied_table_with_padding_is_refused() -> None:
    """A head would perturb the padding that the embedding leaves as it is."""
    model = Language(tied=True)
    model.embedding.padding_idx = 0
    with pytest.raises(ValueError, match="share a weight, and one has a padding_idx"):
        impls.perturb(model, impls.Perturbed(), members=MEMBERS, sigma=0.3)


class SequenceFirst(nn.TransformerEncoderLayer):
    """Attention between positions in the first axis."""

    def __init__(self) -> None:
        super().__init__(4, 2, 8)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one argument
        """Encode [rows, positions, features]."""
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Counted(nn.Linear):
    """A layer that counts its calls in a buffer and in an attribute, and draws random numbers."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Count, and add the same random number to all outputs."""
        self.calls += 1
        self.get_buffer("count").add_(1)
        return super().forward(x) + torch.rand(())


@pytest.mark.parametrize("rows", [8, 5])
def test_an_axis_as_long_as_the_rows_is_not_taken_for_them(rows: int) -> None:
    """The first call with new shapes also runs the model with other numbers of rows."""
    for make, x in (
        (Positions, normal(rows, rows, 4)),
        (SequenceFirst, normal(rows, rows, 4)),
        (lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(4, 3)), normal(rows, 2, rows, 4)),
    ):
        population = impls.perturb(
            fill(make().double().eval()), impls.Perturbed(), members=rows, sigma=0.1, warn=False
        )
        noise = population.sample(0)
        if make is SequenceFirst:
            shorter = x[:, :-1]
            check_members(population, noise, shorter)
        with pytest.raises(ValueError, match=f"as long as the {rows} rows by coincidence"):
            population(x, noise=noise)


def check_members(population: impls.Population, noise: impls.PopulationNoise, x: Tensor) -> None:
    """Check the row of each member, of which there is one, against its own model."""
    y = population(x, noise=noise)
    for member in range(population.members):
        alone = copy.deepcopy(population.model)
        alone.load_state_dict(population.member(noise, member), strict=False)
        torch.testing.assert_close(y[member], alone(x[member : member + 1])[0], rtol=1e-12, atol=1e-12)


def test_the_run_with_other_rows_leaves_no_traces() -> None:
    """Attributes, buffers and the global random generator are as after one call."""
    model = fill(Counted().double())
    assert isinstance(model, Counted)
    population = impls.perturb(model, impls.Perturbed(), members=MEMBERS, sigma=0.1, warn=False)
    torch.manual_seed(3)
    population(normal(ROWS, 4), noise=population.sample(0))
    assert (model.calls, model.get_buffer("count").item()) == (1, 1)
    after = torch.rand(())
    torch.manual_seed(3)
    torch.rand(())
    assert torch.rand(()) == after


def test_a_linear_head_on_a_table_with_padding_is_refused() -> None:
    """The head would perturb the vector of padding, which the table does not."""

    class Head(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return nn.functional.linear(super().forward(tokens), self.weight)

    population = impls.perturb(
        Head(TOKENS, 4, padding_idx=3), impls.Perturbed(), members=MEMBERS, sigma=0.1, warn=False
    )
    with pytest.raises(ValueError, match="without padding_idx"):
        population(tokens(), noise=population.sample(0))


def test_a_scalar_parameter_does_not_change_the_dtype_of_rows() -> None:
    """As in torch, where only tensors with axes do."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    population = impls.perturb(Scaled(), impls.Perturbed(), members=MEMBERS, sigma=0.1, warn=False)
    assert population(normal(ROWS, 4).bfloat16(), noise=population.sample(0)).dtype == torch.bfloat16


class OwnNorm(nn.Module):
    """A normalization with its own scale and shift, after a layer, and a scale that may be left out."""

    def __init__(self, *, uses_gain: bool = True) -> None:
        super().__init__()
        self.layer, self.uses_gain = nn.LSTM(4, 4, batch_first=True), uses_gain
        self.weight, self.bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [rows, positions, features]."""
        y = nn.functional.layer_norm(x, (4,), self.weight, self.bias)
        return y * self.gain if self.uses_gain else y


def test_names_in_messages_can_be_excluded_or_optional() -> None:
    """A module's own parameters have names; the layers of a recurrent module are optional with it."""
    x = normal(MEMBERS, 5, 4)

    def population_of(model: nn.Module, **options: Any) -> impls.Population:
        return impls.perturb(
            fill(model), impls.Perturbed(), members=MEMBERS, sigma=0.1, warn=False, **options
        )

    population = population_of(OwnNorm(uses_gain=False))
    with pytest.raises(ValueError, match="did not use the perturbed layers gain, layer: call"):
        population(x, noise=population.sample(0))
    for options in ({"optional": ["layer", "gain"]}, {"exclude": ["layer", "ga*"]}):
        population = population_of(OwnNorm(uses_gain=False), **options)
        check_members(population, population.sample(0), x)
    population = population_of(OwnNorm(), exclude=["gain"], optional=["layer.weight_*"])
    assert [layer.name for layer in population.layers if layer.is_own_parameter] == ["", "bias"]
    with pytest.raises(
        ValueError, match=r"exclude='layer.weight_ih_l0' is a parameter of a LSTM: exclude 'layer'"
    ):
        population_of(OwnNorm(), exclude=["layer.weight_ih_l0"])
