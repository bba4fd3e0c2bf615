"""Modules of torch and small models: each member computes what its own model computes."""

import contextlib
import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import impls
from tests.scheme_cases import check_members, fill, normal

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


class RootMeanSquareNorm(nn.Module):
    """RMSNorm as language models write it, in another dtype than the rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        wide = x.double()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class Block(nn.Module):
    """A decoder block: rotary positions, grouped queries whose heads are folded into rows, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RootMeanSquareNorm(8), RootMeanSquareNorm(8)
        self.q, self.k, self.v = (nn.Linear(8, width, bias=False) for width in (8, 4, 4))
        self.q_norm, self.out = RootMeanSquareNorm(2), nn.Linear(8, 8, bias=False)
        self.gate, self.up = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False)
        self.down = nn.Linear(6, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform [rows, positions, 8]."""
        rows, length, _ = x.shape
        h = self.attention_norm(x)
        q, k, v = (layer(h).view(rows, length, -1, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = self.q_norm(q.reshape(rows * 4, length, 2)).view(rows, 4, length, 2)
        angle = torch.arange(length).to(x)[:, None]
        q, k = (
            torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
            for a, b in (part.chunk(2, -1) for part in (q, k))
        )
        k, v = (part.repeat_interleave(2, 1) for part in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, 8))
        h = self.ffn_norm(x).view(-1, 8)
        gated: Tensor = self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return x + gated.view_as(x)


class Decoder(nn.Module):
    """A language model of such blocks, with the table of its embedding as its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(TOKENS, 8), RootMeanSquareNorm(8)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, positions, tokens]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


class OneByOne(nn.Module):
    """GPT-2's linear layer: a product of all positions with an own matrix [in, out]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(inputs, outputs)),
            nn.Parameter(torch.empty(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Multiply [..., in]."""
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], -1)


class LearnedPositions(nn.Module):
    """GPT-2's inputs: a table of tokens, and one of positions that is read without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.layer = nn.Embedding(TOKENS, 4), nn.Embedding(9, 4), OneByOne(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, positions, tokens] of the next tokens."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return (self.layer(x) @ self.layer.weight.T) @ self.tokens.weight.T


class VisionTransformer(nn.Module):
    """Patches by a convolution, a class token, and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(2, 4, 2, stride=2), nn.Linear(4, 3)
        self.cls, self.positions = nn.Parameter(torch.empty(1, 1, 4)), nn.Parameter(torch.empty(1, 5, 4))
        self.block, self.scale = (
            nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
            nn.Parameter(torch.ones(4)),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Classify images [rows, 2, 4, 4]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
        y: Tensor = self.head((x + self.scale * self.block(x))[:, 0])
        return y


class FoldedPolicy(nn.Module):
    """A policy that folds time into rows, before them or after them, for its convolution and its heads."""

    def __init__(self, *, is_time_first: bool) -> None:
        super().__init__()
        self.frames, self.memory, self.head = nn.Conv2d(2, 2, 2), nn.GRU(8, 4), nn.Linear(4, 3)
        self.log_std, self.is_time_first = nn.Parameter(torch.zeros(3)), is_time_first

    def forward(self, x: Tensor) -> Tensor:
        """Return means and deviations [rows, time, 6] for frames [rows, time, 2, 3, 3]."""
        x = x.transpose(0, 1) if self.is_time_first else x
        y = self.frames(x.flatten(0, 1)).relu().view(*x.shape[:2], -1)
        y, _ = self.memory(y if self.is_time_first else y.transpose(0, 1))
        y = y if self.is_time_first else y.transpose(0, 1)
        mean = self.head(y.reshape(-1, 4))
        y = torch.cat([mean, self.log_std.exp() * mean], -1).view(*x.shape[:2], -1)
        return y.transpose(0, 1) if self.is_time_first else y


class CrossAttention(nn.Module):
    """Attention to a memory whose keys and values have other widths."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, bias=bias, kdim=3, vdim=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to parts of [rows, positions, 4]."""
        y: Tensor = self.attention(x, x[:, 1:, :3], x[:, 1:, 1:3])[0]
        return y


class AddedPositions(nn.Module):
    """Attention to a learned key and value, and to zeros, with masks and without, and to other widths."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"add_bias_kv": True, "batch_first": True}
        self.first = nn.MultiheadAttention(4, 2, **options)
        self.second = nn.MultiheadAttention(4, 2, add_zero_attn=True, kdim=3, vdim=2, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to [rows, positions, 4]; return outputs and attention weights."""
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y, _ = self.first(x, x, x, attn_mask=hidden, key_padding_mask=x[..., 0] < 0, need_weights=False)
        outputs: tuple[Tensor, Tensor] = self.second(y, x[..., :3], x[..., 1:3])
        return outputs


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
    "LSTM": lambda: (nn.LSTM(4, 5, 2, batch_first=True, bidirectional=True), normal(ROWS, 2, 4)),
    "GRU": lambda: (nn.GRU(4, 5, 2, batch_first=True), normal(ROWS, 3, 4)),
    "RNN": lambda: (nn.RNN(4, 5, batch_first=True, bias=False, nonlinearity="relu"), normal(ROWS, 6, 4)),
    "LSTM with a projection": lambda: (
        nn.LSTM(4, 5, 2, proj_size=3, batch_first=True, bidirectional=True), normal(ROWS, 2, 4)
    ),
    "LSTMCell": lambda: (nn.LSTMCell(4, 5), normal(ROWS, 4)),
    "GRUCell": lambda: (nn.GRUCell(4, 5), normal(ROWS, 4)),
    "RNNCell": lambda: (nn.RNNCell(4, 5), normal(ROWS, 4)),
    "MultiheadAttention": lambda: (Attention(), normal(ROWS, 6, 4)),
    "attention to other widths": lambda: (CrossAttention(bias=True), normal(ROWS, 6, 4)),
    "attention to other widths without bias": lambda: (CrossAttention(bias=False), normal(ROWS, 6, 4)),
    "attention to added positions": lambda: (AddedPositions(), normal(ROWS, 5, 4)),
    "TransformerEncoder": lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2), normal(ROWS, 6, 4)
    ),
    "positions first": lambda: (PositionsFirst(), normal(ROWS, 5, 4)),
    "own parameters": lambda: (Normalized(), normal(ROWS, 5, 4)),
    "language model": lambda: (Language(tied=False), tokens()),
    "tied language model": lambda: (Language(tied=True), tokens()),
    "decoder": lambda: (Decoder(), tokens()),
    "learned positions": lambda: (LearnedPositions(), tokens()),
    "vision transformer": lambda: (VisionTransformer(), normal(ROWS, 2, 4, 4)),
    "time after rows": lambda: (FoldedPolicy(is_time_first=False), normal(ROWS, 5, 2, 3, 3)),
    "time before rows": lambda: (FoldedPolicy(is_time_first=True), normal(ROWS, 5, 2, 3, 3)),
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


@pytest.mark.parametrize(("number", "model_name"), [*enumerate(MODELS)])
def test_each_member_is_its_own_model(number: int, model_name: str) -> None:
    """Rows equal those of the plain model with the member's weights; the update is the sum over members.

    Half of the schemes run with antithetic halves: the other half of them for the next model.
    """
    make = MODELS[model_name]
    for index, (label, scheme) in enumerate(SCHEMES.items()):
        antithetic = (number + index) % 2 == 0
        model, x = make()
        fill(model.eval())
        population = impls.perturb(
            model, scheme, members=MEMBERS, sigma=0.3, antithetic=antithetic, warn=False
        )
        noise = population.sample(7)
        check_members(population, noise, x, label)
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


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_autocast_gives_the_dtypes_of_torch(make: Any) -> None:
    """Under autocast all outputs have the dtype of the plain model's, and about its numbers."""
    model, x = make()
    model = fill(model.eval()).float()
    x = x.float() if x.is_floating_point() else x
    population = impls.perturb(model, impls.Flipped(), members=MEMBERS, sigma=1e-6, warn=False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), without_fast_path():
        outputs = tree_leaves(population(x, noise=population.sample(0)))
        for y, expected in zip(outputs, tree_leaves(model(x)), strict=True):
            assert y.dtype == expected.dtype
            assert (y - expected).norm() < 0.05 * expected.norm()


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """Run torch's transformers as in training."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Padded(nn.Module):
    """A transformer whose rows have padded positions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Average over positions."""
        y: Tensor = self.encoder(x, src_key_padding_mask=padding).mean(1)
        return y


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_padded_positions_are_those_of_training() -> None:
    """In evaluation torch's fast path sets padded positions to 0; the population and verify() do not."""
    model, x, padding = fill(Padded().eval()), normal(ROWS, 6, 4), torch.arange(6).expand(ROWS, 6) > 3
    population = impls.perturb(model, impls.LowRank(1), members=MEMBERS, sigma=0.1)
    noise = population.sample(0)
    population.verify(x, padding)
    assert torch.backends.mha.get_fastpath_enabled()
    alone = copy.deepcopy(model)
    alone.load_state_dict(population.member(noise, 1), strict=False)
    y = population(x, padding, noise=noise)[1:2]
    with torch.no_grad():
        assert not torch.allclose(y, alone(x[1:2], padding[1:2]))
        with without_fast_path():
            torch.testing.assert_close(y, alone(x[1:2], padding[1:2]), rtol=1e-12, atol=1e-12)


class Positions(nn.Module):
    """A table of positions that is read without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Add a vector to each position."""
        return x + self.table(torch.arange(x.shape[1]))


class FewRows(nn.Module):
    """A choice of rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep five rows."""
        return x[:5]


class Returned(nn.Module):
    """A parameter that is returned without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and a parameter."""
        return x * self.scale, self.scale.exp()


class Clipped(Returned):
    """A parameter that is changed."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # one tensor
        """Change the parameter."""
        self.scale.clamp_(0, 1)
        return x * self.scale


class Twice(nn.Module):
    """A layer that gets rows first, and positions first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Use the layer twice."""
        y: Tensor = self.layer(self.layer(x).transpose(0, 1)).transpose(0, 1)
        return y


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], object], str]] = {
    **{
        f"packed sequence for {layer.__name__}": (
            functools.partial(layer, 4, 4),
            lambda: nn.utils.rnn.pack_sequence([normal(3, 4)] * ROWS),
            "a packed sequence mixes the rows",
        )
        for layer in (nn.GRU, nn.LSTM)
    },
    "some rows": (
        lambda: nn.Sequential(FewRows(), nn.Linear(4, 3)),
        lambda: normal(ROWS, 4),
        r"shape \[5, 4\], but the model got 8 rows",
    ),
    "returned parameter": (
        Returned,
        lambda: normal(ROWS, 4),
        r"returned a tensor of shape \[4\] that depends on parameter 'scale' and not on the rows",
    ),
    "changed parameter": (
        Clipped,
        lambda: normal(ROWS, 4),
        r"parameter 'scale' is changed by torch.Tensor.clamp_: freeze",
    ),
    "rows first and positions first": (
        Twice,
        lambda: normal(ROWS, ROWS, 4),
        "as long as the 8 rows by coincidence",
    ),
}


@pytest.mark.parametrize(("make", "inputs", "words"), REFUSED.values(), ids=REFUSED)
def test_uses_without_rows_are_refused(make: Any, inputs: Any, words: str) -> None:
    """A use whose result would not be that of each member is an error that says what to do."""
    population = impls.perturb(fill(make()), impls.Perturbed(), members=MEMBERS, sigma=0.3)
    with pytest.raises(ValueError, match=words):
        population(inputs(), noise=population.sample(0))


def test_tables_that_share_a_weight_share_the_padding() -> None:
    """If one of them has none, whether its token is perturbed would depend on their order."""
    plain, padded = nn.Embedding(5, 3), nn.Embedding(5, 3, padding_idx=0)
    padded.weight = plain.weight
    for pair in ((plain, padded), (padded, plain)):
        with pytest.raises(ValueError, match="share a weight, but not a padding_idx"):
            impls.perturb(nn.ModuleList(pair), impls.Perturbed(), members=MEMBERS, sigma=0.3)


def test_a_tied_table_with_padding_is_refused() -> None:
    """A head would perturb the padding that the embedding leaves as it is."""
    model = Language(tied=True)
    model.embedding.padding_idx = 0
    with pytest.raises(ValueError, match="share a weight, but not a padding_idx"):
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
    """The first call with new shapes also runs the model with two and three rows."""
    for make, x in (
        (Positions, normal(rows, rows, 4)),
        (SequenceFirst, normal(rows, rows, 4)),
        (Folded, normal(rows, 2, rows, 4)),
    ):
        population = impls.perturb(
            fill(make().double().eval()), impls.Perturbed(), members=rows, sigma=0.1, warn=False
        )
        noise = population.sample(0)
        check_members(population, noise, x)
        check_members(population, noise, x[:, :-1])


class FixedRows(nn.Linear):
    """A linear layer on [positions, rows, 4] in a model that takes eight rows only."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Transform [8, positions, 4]."""
        return super().forward(x.view(8, x.shape[1], 4).transpose(0, 1)).transpose(0, 1)


def test_an_axis_that_cannot_be_found_is_not_guessed() -> None:
    """If the model does not run with few rows, an input with two axes as long as the rows is refused."""
    population = impls.perturb(fill(FixedRows()), impls.Perturbed(), members=8, sigma=0.1, warn=False)
    noise = population.sample(0)
    assert population(normal(8, 5, 4), noise=noise).shape == (8, 5, 3)
    with pytest.raises(ValueError, match="another axis is as long as the 8 rows by coincidence"):
        population(normal(8, 8, 4), noise=noise)


class Folded(nn.Linear):
    """A linear layer that folds an axis into the rows."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Transform [rows, positions, ..., 4]."""
        return super().forward(x.flatten(0, 1)).view(*x.shape[:-1], 3)


class FoldedTokens(nn.Embedding):
    """A table that folds positions into the rows."""

    def __init__(self) -> None:
        super().__init__(TOKENS, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up [rows, positions]."""
        return super().forward(tokens.flatten().long()).view(*tokens.shape, 4)


@pytest.mark.parametrize("value", [0, 1, TOKENS - 1])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_folded_rows_are_found_if_all_tokens_are_equal(dtype: torch.dtype, value: int) -> None:
    """The run with another second row takes a token that the table has."""
    population = impls.perturb(fill(FoldedTokens()), impls.Perturbed(), members=8, sigma=0.1, warn=False)
    check_members(population, population.sample(0), torch.full((8, 8), value, dtype=dtype))


class TimeFirst(nn.Module):
    """A model of torch's layers as they are by default: tokens and outputs are [positions, rows]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.memory = nn.Embedding(TOKENS, 4), nn.LSTM(4, 4, 2)
        self.block, self.scale = nn.TransformerEncoderLayer(4, 2, 8), nn.Parameter(torch.ones(4))
        self.start, self.head = nn.Parameter(torch.zeros(2, 1, 4)), nn.Linear(4, 3)

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return outputs [positions, rows, 3] and the state [layers, rows, 4]."""
        x = self.block(self.embedding(tokens) * self.scale)
        y, (hidden, _) = self.memory(x, (self.start.expand(-1, x.shape[1], -1), state))
        return self.head(y.flatten(0, 1)).view(*tokens.shape, 3), hidden


@pytest.mark.parametrize("antithetic", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_rows_may_be_the_second_axis_of_inputs(scheme: Any, antithetic: bool) -> None:
    """With rows_axis=1 a model takes [positions, rows, ...]; all arguments and outputs are checked."""
    model = fill(TimeFirst().eval())
    population = impls.perturb(
        model, scheme, members=MEMBERS, sigma=0.3, antithetic=antithetic, warn=False, rows_axis=1
    )
    x = tokens()[: (1 if antithetic else 2)].T
    assert population.rows(x).shape == (5, ROWS)
    assert torch.equal(population.rows(x)[:, 0], x[:, 0])
    population.verify(tokens().T, state=normal(2, ROWS, 4))
    with pytest.raises(ValueError, match="5 rows is not a multiple of 4 members"):
        population(tokens(), normal(2, ROWS, 4), noise=population.sample(0))


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


@dataclass
class Memory:
    """A state of a model that is neither a tensor nor a module."""

    last: Tensor | None = None


class Storing(nn.Linear):
    """A layer that stores its output in a way of the test's choice."""

    def __init__(self, store: Callable[[Any, Tensor], object]) -> None:
        super().__init__(4, 3)
        self.store, self.log, self.memory = store, [*torch.zeros(9)], Memory()
        self.nested = {"nested": (set[Tensor](), deque[Tensor]())}
        self.mean = torch.zeros(3, dtype=torch.float64)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Store the output."""
        y = super().forward(x)
        self.store(self, y)
        return y

    def stored(self) -> str:
        """Return what is stored as text, with four digits of each number."""
        return str((self.log, self.memory, self.nested, self.mean, self.total))


STORES: dict[str, Callable[[Any, Tensor], object]] = {
    "log": lambda model, y: model.log.append(y),
    "log ": lambda model, _: model.log.pop(),
    "memory": lambda model, y: setattr(model.memory, "last", y),
    "nested": lambda model, y: model.nested["nested"][0].add(y),
    "nested ": lambda model, y: model.nested["nested"][1].append(y),
    "mean": lambda model, y: model.mean.add_(y[0]),
    "total": lambda model, y: model.total.copy_(y[0]),
}
"""Changes of an attribute of this name."""


def test_a_stored_value_of_a_parameter_does_not_disturb_later_calls() -> None:
    """The state of a model that stores such a value is restored, too."""
    model = Storing(lambda model, _: model.log.append(model.bias.exp()))
    population = impls.perturb(fill(model), impls.Perturbed(), members=MEMBERS, sigma=0.1, warn=False)
    noise = population.sample(0)
    population(normal(ROWS, 4), noise=noise)
    with pytest.raises(ValueError, match="the forward stores log in its modules"):
        population.prepare(noise, normal(2 * ROWS, 4))


@pytest.mark.parametrize(("name", "store"), STORES.items(), ids=STORES)
def test_a_call_stores_what_one_forward_does(name: str, store: Callable[[Any, Tensor], object]) -> None:
    """A model that stores values is not prepared, because the recorded operations would store nothing."""
    model = fill(Storing(store).double())
    assert isinstance(model, Storing)
    plain, x = copy.deepcopy(model), normal(ROWS, 4)
    population = impls.perturb(model, impls.Perturbed(), members=MEMBERS, sigma=1e-12, warn=False)
    with torch.no_grad():
        plain(x)
    population(x, noise=population.sample(0))
    assert model.stored() == plain.stored()
    with pytest.raises(ValueError, match=f"the forward stores {name.strip()} in its modules"):
        population.prepare(population.sample(0), x)


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
