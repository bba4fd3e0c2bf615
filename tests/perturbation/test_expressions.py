"""Models that compute with their parameters themselves, without torch's modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import impls
from tests.perturbation.test_models import MEMBERS, ROWS, SCHEMES, TOKENS, tokens
from tests.scheme_cases import check_members, fill, normal


class Expression(nn.Module):
    """A model with a forward of the test's choice, over layers and parameters that are its attributes."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **parts: nn.Module | tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(torch.zeros(part)))

    def forward(self, x: Tensor) -> Any:
        """Run the model."""
        return self.run(self, x)


def add_in_place(model: Any, x: Tensor) -> Tensor:
    """Add a parameter to all positions, write another to the first, and change masks and other values."""
    x = x.clone()
    x += model.w
    x[:, 0] = model.b
    is_positive, values = x > 0, model.b * 2
    is_positive &= model.b > 0
    return torch.where(is_positive, x, functional.relu(values, inplace=True) + values)


def folded_policy(model: Any, x: Tensor) -> Tensor:
    """Scale the outputs of folded rows by a standard deviation that is expanded to them."""
    mean = model.a(x.flatten(0, 1))
    y: Tensor = mean * model.w.exp().expand_as(mean)
    return y.view(*x.shape[:2], 3)


PRODUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...] | None]] = {
    "tied decoder": (
        lambda: Expression(
            lambda m, x: functional.linear(m.a(x).tanh(), m.a.weight.t(), m.b), a=nn.Linear(4, 3), b=(4,)
        ),
        (ROWS, 4),
    ),
    "x @ W and x @ W.T": (
        lambda: Expression(
            lambda m, x: (x @ m.a.weight.T).tanh() @ m.a.weight, a=nn.Linear(4, 3, bias=False)
        ),
        (ROWS, 5, 4),
    ),
    "einsum": (
        lambda: Expression(
            lambda m, x: torch.einsum(
                "vd,...v->...d", m.a.weight, torch.einsum("btd,vd->btv", x, m.a.weight)
            ),
            a=nn.Linear(4, 3, bias=False),
        ),
        (ROWS, 5, 4),
    ),
    "indexed table": (
        lambda: Expression(
            lambda m, x: m.a.weight[x] * m.a.weight[torch.arange(5)], a=nn.Embedding(TOKENS, 4)
        ),
        None,
    ),
    "tied language model": (
        lambda: Expression(
            lambda m, x: functional.linear(m.a(x), m.a.weight) - m.a(x).sin() @ m.a.weight.mT,
            a=nn.Embedding(TOKENS, 4),
        ),
        None,
    ),
}
EXPRESSIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own matrix": (lambda: Expression(lambda m, x: x @ m.w + m.b, w=(4, 3), b=(3,)), (ROWS, 5, 4)),
    "addmm": (lambda: Expression(lambda m, x: torch.addmm(m.b, x, m.w), w=(4, 3), b=(3,)), (ROWS, 4)),
    "linear": (
        lambda: Expression(lambda m, x: functional.linear(x, m.w, m.b), w=(3, 4), b=(3,)), (ROWS, 5, 4)
    ),
    "own matrices of heads": (
        lambda: Expression(lambda m, x: torch.einsum("btd,hde->bhte", x, m.w), w=(2, 4, 3)), (ROWS, 5, 4)
    ),
    "batch of own matrices": (lambda: Expression(lambda m, x: x[:, None] @ m.w, w=(2, 4, 3)), (ROWS, 5, 4)),
    "convolution": (
        lambda: Expression(lambda m, x: functional.conv1d(x, m.w, m.b, padding=1), w=(2, 5, 3), b=(2,)),
        (ROWS, 5, 4),
    ),
    "low-rank adapter": (
        lambda: Expression(lambda m, x: functional.linear(x, m.c + m.b @ m.a), a=(2, 4), b=(3, 2), c=(3, 4)),
        (ROWS, 4),
    ),
    "Gemma's normalization": (
        lambda: Expression(
            lambda m, x: functional.rms_norm(x, (4,)) * (1.0 + m.w.float()).type_as(x), w=(4,)
        ),
        (ROWS, 5, 4),
    ),
    "group normalization": (
        lambda: Expression(lambda m, x: functional.group_norm(x, 2, m.w, m.b), w=(4,), b=(4,)), (ROWS, 4, 3)
    ),
    "temperature": (lambda: Expression(lambda m, x: x * m.w.exp(), w=()), (ROWS, 5, 4)),
    "logarithm of a standard deviation": (
        lambda: Expression(
            lambda m, x: torch.cat([m.a(x), m.w.exp().expand_as(x)], -1), w=(4,), a=nn.Linear(4, 3)
        ),
        (ROWS, 4),
    ),
    "normalized weights": (
        lambda: Expression(
            lambda m, x: m.c(m.a(m.b(x.mT).mT)),
            a=parametrizations.weight_norm(nn.Linear(6, 3)),
            c=parametrizations.weight_norm(nn.LayerNorm(3), dim=0),
            b=parametrizations.spectral_norm(nn.Conv1d(4, 6, 3, groups=2)),
        ),
        (ROWS, 5, 4),
    ),
    "normal distribution": (
        lambda: Expression(
            lambda m, x: torch.distributions.Normal(m.a(x), m.w.exp(), validate_args=False).log_prob(x),
            w=(4,), a=nn.Linear(4, 4),
        ),
        (ROWS, 4),
    ),
    "deviations of folded rows": (lambda: Expression(folded_policy, w=(3,), a=nn.Linear(4, 3)), (ROWS, 5, 4)),
    "own table": (
        lambda: Expression(
            lambda m, x: m.w[(x[..., 0] > 0).long()] + functional.embedding((x[..., 1] > 0).long(), m.w),
            w=(2, 4),
        ),
        (ROWS, 5, 4),
    ),
    "state-space decay": (
        lambda: Expression(
            lambda m, x: (x[..., None] * -torch.exp(m.w)).sum(-1).cumsum(1) + m.b.softmax(0),
            w=(4, 3), b=(4,),
        ),
        (ROWS, 5, 4),
    ),
    "class token": (
        lambda: Expression(
            lambda m, x: m.a(torch.cat([m.w.expand(len(x), -1, -1), x, m.w.repeat(len(x), 2, 1)], 1)),
            w=(1, 1, 4), a=nn.Linear(4, 3),
        ),
        (ROWS, 5, 4),
    ),
    "as many copies as rows": (
        lambda: Expression(lambda m, x: x + m.w.expand(ROWS, -1).cumsum(0).mean(0), w=(1, 4)), (ROWS, 5, 4)
    ),
    "positions": (lambda: Expression(lambda m, x: x + m.w[:, : x.shape[1]], w=(1, 9, 4)), (ROWS, 5, 4)),
    "positions first": (
        lambda: Expression(lambda m, x: (x.transpose(0, 1) * m.w).transpose(0, 1), w=(4,)), (ROWS, 5, 4)
    ),
    "arguments by name": (
        lambda: Expression(
            lambda m, x: functional.linear(input=x, weight=m.w)
            * torch.broadcast_to(input=m.b, size=(len(x), 3)),
            w=(3, 4), b=(3,),
        ),
        (ROWS, 4),
    ),
    "in place": (lambda: Expression(add_in_place, w=(5, 4), b=(4,)), (ROWS, 5, 4)),
    "parts of a parameter": (
        lambda: Expression(lambda m, x: torch.where(x > 0, x * m.w.chunk(2)[0], m.w[4:]), w=(8,)),
        (ROWS, 5, 4),
    ),
    "latent queries": (
        lambda: Expression(
            lambda m, x: m.a(m.c(m.b(m.w)).expand(len(x), -1, -1), x, x)[0],
            w=(3, 4), b=nn.LayerNorm(4), c=nn.Linear(4, 4), a=nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        (ROWS, 5, 4),
    ),
    "learned initial state": (
        lambda: Expression(
            lambda m, x: m.a(x, m.w.expand(-1, len(x), -1))[0], w=(1, 1, 3), a=nn.GRU(4, 3, batch_first=True)
        ),
        (ROWS, 5, 4),
    ),
    "parameters of torch's modules": (
        lambda: Expression(lambda m, x: m.a(x) * m.a.weight.abs() - m.a.bias, a=nn.LayerNorm(4)), (ROWS, 5, 4)
    ),
}  # fmt: skip


def check(make: Callable[[], nn.Module], x: Tensor, scheme: Any, *, antithetic: bool = True) -> None:
    """Check rows, also those of a prepared forward, against the written-out members."""
    model = fill(make().eval())
    population = impls.perturb(model, scheme, members=MEMBERS, sigma=0.3, antithetic=antithetic, warn=False)
    noise = population.sample(7)
    y = check_members(population, noise, x)
    if isinstance(scheme, impls.LowRank) and not scheme.regenerated:
        torch.testing.assert_close(population.prepare(noise, x)(x), y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("make", "shape"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_with_a_layers_weight_is_that_of_each_member(make: Any, shape: Any) -> None:
    """The product is over either axis, and shares the noise of the layer's own calls."""
    for number, scheme in enumerate(SCHEMES.values()):
        check(make, normal(*shape) if shape else tokens(), scheme, antithetic=number % 2 == 0)


@pytest.mark.parametrize(("make", "shape"), EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_an_expression_with_parameters_is_that_of_each_member(make: Any, shape: Any) -> None:
    """Functions of parameters with dense noise, with rows or without, use each member's values."""
    check(make, normal(*shape), impls.LowRank(1))
