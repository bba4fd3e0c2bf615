"""Checks that name no scheme: every registered variant against the reference implementation."""

import math
import re
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from esbench.registry import Entry
from esbench.schema import Case
from esbench.workload import build
from impls import Population, PopulationNoise, perturb
from impls.benchmark import inputs
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.operators import AbstractOperator, Convolution, Linear, TransposedLinear
from impls.perturbation.scheme import AbstractAdditiveScheme, AbstractScheme, AnyScheme
from impls.quality import bias, kappa
from impls.verify import checks
from impls.verify.checks import Setting, check_purity, check_split
from impls.verify.reference import check_forward, check_update
from tests.scheme_cases import fill, make_stream, normal
from tests.workload_cases import BITS, CHECKS, NUMBERS, every_variant, suits

ENTRIES = [entry for entry in NUMBERS if isinstance(entry.scheme, AbstractScheme)]
every_scheme = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)
STRIDED = next(case for case in CHECKS if case.groups != 1)
PLAIN = next(case for case in CHECKS if case.operator == "Linear")
NARROW = Case(
    operator="Linear", out_channels=48, in_channels=64, bias=True, members=32, repeats=2, dtype="float32"
)


def scheme_of(entry: Entry) -> AnyScheme:
    """Return an entry's scheme, typed."""
    assert isinstance(entry.scheme, AbstractScheme)
    return entry.scheme


def check_each(cases: Any, check: Callable[..., None]) -> None:
    """Run a check on every case, and add the case to the traceback of an error."""
    for case in cases:
        try:
            check(*case)
        except Exception as error:  # every error, named and raised again
            error.add_note(f"case {', '.join(map(str, case))}")
            raise


@pytest.fixture
def noise_checks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the noise by many draws in one of a test's cases: it hardly depends on the operator or dtype."""

    def once(check: Callable[..., None]) -> Callable[..., None]:
        done: list[bool] = []

        def checked(*arguments: Any) -> None:
            if not done:
                check(*arguments)
                done.append(True)

        return checked

    for module, name in (
        (checks, "check_independence"),
        (checks, "check_moments"),
        (checks, "check_timed_moments"),
        (bias, "check_steps"),
        (kappa, "check_kappa"),
    ):
        monkeypatch.setattr(module, name, once(getattr(module, name)))


@every_variant
@pytest.mark.usefixtures("noise_checks_once")
def test_agrees_with_the_reference_on_every_operator(entry: Entry) -> None:
    """Every variant passes every check of :mod:`impls.verify.checks` in float64."""
    check_each(
        ((case,) for case in CHECKS if suits(entry, case)),
        lambda case: build(entry.scheme, case, "cpu", 0).verify(),
    )


@every_variant
@pytest.mark.usefixtures("noise_checks_once")
def test_errs_at_most_twice_the_reference_in_narrow_dtypes(entry: Entry) -> None:
    """Errors of each phase are at most twice those of dense weights in the same dtype.

    On a CPU TF32 is float32: tests/measure/test_float32_precision.py rounds to it. Each variant runs in
    bfloat16 and, in turn, in one of the other dtypes with antithetic halves.
    """
    is_binary = not suits(entry, NARROW)
    base = msgspec.structs.replace(BITS, repeats=2, bias=True) if is_binary else NARROW

    def check(dtype: str, antithetic: bool) -> None:
        case = msgspec.structs.replace(base, dtype=dtype, antithetic=antithetic and not is_binary)
        work = build(entry.scheme, case, "cpu", 0)
        for phase in work.phases:
            work.enter(phase)
            work.confirm(phase)

    other = ("float32", "float16")[ENTRIES.index(entry) % 2 if entry in ENTRIES else 0]
    check_each((("bfloat16", False), (other, True)), check)


@every_scheme
def test_odd_shapes_are_right_or_refused(entry: Entry) -> None:
    """Odd widths, one channel and one member give the right result, or an error with the numbers."""

    def check(model: nn.Module, features: tuple[int, ...], members: int) -> None:
        try:
            population = perturb(fill(model), scheme_of(entry), members=members, sigma=0.1, warn=False)
        except ValueError as error:
            assert re.search(r"\d", str(error))  # noqa: PT017  the error is one of two valid outcomes
            return
        x = normal(members, *features)
        check_forward(population, x, range(members))
        check_update(population, x, range(members))

    layers = [(nn.Linear(i, o), (i,)) for o, i in ((1, 1), (1, 5), (5, 1), (3, 7), (17, 33))]
    check_each(((*layer, members) for layer in layers for members in (1, 3)), check)
    check(nn.Conv2d(1, 1, (2, 3), padding=1), (1, 4, 5), 2)


@every_scheme
@pytest.mark.parametrize("members", [1, 512])
def test_noise_drawn_into_older_noise_has_the_same_bits(entry: Entry, members: int) -> None:
    """Also in parts, and without a change of the weights, of older dense noise, or of what noise shares."""
    if not suits(entry, PLAIN):
        return
    model = fill(nn.Linear(16, 16))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    stream = "philox" if members == 1 else "block"
    population = perturb(model, scheme_of(entry), members=members, sigma=0.1, stream=stream, warn=False)

    def bits(noise: PopulationNoise) -> list[Tensor]:
        dense = population.dense_noise(noise)
        return [*(values.clone() for values in noise.tensors()), *dense.values()]

    halves = (range(256), range(256, members)) if members > 1 else (None,)
    parts = [(0, None), (1, None), *((2, part) for part in halves), (0, None)]
    expected = [bits(population.sample(*part)) for part in parts]
    noise, drawn = None, []
    for part in parts:
        noise, older = population.sample(*part, out=noise), noise
        drawn.append(bits(noise))
        if older is not None:
            with pytest.raises(ValueError, match="has overwritten this noise"):
                population(normal(members, 16), noise=older)
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close([*model.parameters()], weights, rtol=0, atol=0)


@every_scheme
def test_products_with_the_transpose_agree_with_the_reference(entry: Entry) -> None:
    """The transpose of each member's weight, as a tied decoder uses it, also on tokens and antithetic."""
    scheme = scheme_of(entry)
    if not suits(entry, PLAIN) or scheme.learns_from_rows:
        return

    def check(o: int, i: int, tokens: int, sigma: float | Tensor) -> None:
        rows, weight = normal(2, 7, 1, tokens or 1, o), normal(1, o, i)
        x = rows.mT if tokens else rows[..., 0, :]
        scale = sigma[..., 0] if isinstance(sigma, Tensor) and not tokens else sigma
        noise = scheme.prepare(scheme.sample(weight, make_stream(range(3, 10))), weight, 0.1)
        y = scheme.forward_transposed(TransposedLinear(), weight, noise, x, scale)
        expected = rows @ weight + sigma * (rows @ scheme.dense_noise(noise))
        torch.testing.assert_close(y.mT if tokens else y.unsqueeze(3), expected, rtol=1e-12, atol=1e-12)

    signed = torch.tensor([0.1, -0.1]).double().view(2, 1, 1, 1, 1)
    with torch.no_grad():
        check_each(product((5, 12), (12, 5), (0, 3), (0.1, signed)), check)


@every_scheme
def test_declares_how_many_different_perturbations_a_layer_can_have(entry: Entry) -> None:
    """The bound is not exceeded, and finite if most of 1000 members have the noise of another member."""

    def check(shape: tuple[int, ...]) -> None:
        scheme, weight = scheme_of(entry), normal(*shape).abs() + 0.5
        try:
            noise = scheme.sample(weight, make_stream(range(1000)))
        except UnsupportedError:
            return
        different = len(scheme.dense_noise(noise).flatten(1).unique(dim=0))
        bound = scheme.distinct_perturbations(weight.shape)
        assert different <= bound
        assert (bound < math.inf) == (different < 500)

    check_each([[(1, 1, 3)], [(1, 3, 1)], [(2, 1, 2)], [(1, 2, 1, 2, 1)]], check)


@every_scheme
def test_agrees_with_the_reference_with_philox(entry: Entry) -> None:
    """Every scheme agrees with the counter-based stream, whose populations may be split at any member."""

    def setting(case: Case) -> Setting:
        layer = inputs.layer(case, "cpu", 0)
        return Setting(scheme_of(entry), layer, inputs.features(case), stream="philox")

    strided = setting(STRIDED)
    for antithetic in (False, True):
        population, x = strided.population(5, antithetic=antithetic), strided.rows(20)
        check_forward(population, x, range(5))
        check_update(population, x, range(5))
    plain = setting(PLAIN)
    check_purity(plain)
    check_split(plain)
    population, members = plain.population(7), range(7)
    all_members = population.dense_noise(population.sample(3))
    for ends in ((0, 1, 7), (0, 3, 4, 7), (0, 6, 7)):
        parts = [population.dense_noise(population.sample(3, members[a:b])) for a, b in pairwise(ends)]
        for name, values in all_members.items():
            assert torch.equal(values, torch.cat([piece[name] for piece in parts])), ends


ONE_OF_A_CLASS = {type(entry.scheme): entry for entry in ENTRIES}.values()


@pytest.mark.parametrize("entry", ONE_OF_A_CLASS, ids=lambda entry: entry.variant.name)
def test_a_compiled_forward_agrees_with_the_eager_one(entry: Entry) -> None:
    """A trace computes the same as the eager forward, on a grouped convolution and on a Linear layer."""
    signed = torch.tensor([0.1, -0.1]).view(2, 1, 1, 1, 1, 1)
    layers: list[tuple[AbstractOperator, nn.Module, tuple[int, ...], float | Tensor]] = [
        (Convolution(groups=2), nn.Conv2d(6, 8, 3, groups=2, bias=False), (2, 3, 5, 5), signed)
    ]
    if isinstance(entry.scheme, AbstractAdditiveScheme):
        # A product that adds to its output has a path for a number and one for a tensor.
        linear = nn.Linear(6, 8, bias=False)
        layers += [(Linear(), linear, (1, 6), scale) for scale in (0.1, signed.view(2, 1, 1, 1))]
    calls, inputs = [], []
    for op, module, features, scale in layers:
        population = perturb(fill(module, torch.float32), scheme_of(entry), members=4, sigma=0.1, warn=False)
        noise, layer = population.sample(0).layers[""].weight, population.layers[0]
        weight = layer.split_groups(layer.weight.detach().clone())
        calls.append((op, weight, noise, scale))
        inputs.append(normal(2, 4, *features).float())

    def forward(*inputs: Tensor) -> list[Tensor]:
        return [
            scheme_of(entry).forward(op, weight, noise, x, scale)
            for (op, weight, noise, scale), x in zip(calls, inputs, strict=True)
        ]

    torch.compiler.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(forward, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), forward(*inputs), rtol=1e-5, atol=1e-5)


def test_utilities_of_any_size_are_scaled_before_they_are_rounded_to_a_narrow_dtype() -> None:
    """Utilities of any size give the scaled gradient, or an error if float16 cannot represent it."""
    utilities = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)

    def gradient(population: Population, scale: float) -> Tensor:
        population.model.zero_grad()
        noise = population.sample(0)
        _, record = population.call_with_activations(torch.ones(5, 6, dtype=torch.float16), noise=noise)
        population.update(noise, utilities * scale, record)
        grad = population.model.get_parameter("weight").grad
        assert grad is not None
        return grad.double()

    def check(entry: Entry) -> None:
        model = fill(nn.Linear(6, 4), torch.float16)
        population = perturb(model, scheme_of(entry), members=5, sigma=0.1, warn=False)
        plain = gradient(population, 1.0)
        for scale in (1e3, 1e30, 1e-30):
            if bool((scale * plain.abs() > torch.finfo(torch.float16).max).any()):
                with pytest.raises(ValueError, match=r"is not finite in torch\.float16"):
                    gradient(population, scale)
            else:
                torch.testing.assert_close(gradient(population, scale), scale * plain, rtol=2e-3, atol=1e-7)

    check_each(((entry,) for entry in ENTRIES), check)
