"""Checks that name no scheme: every registered variant against the reference implementation."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from esbench.measure.float32_precision import precision
from esbench.registry import Entry, build
from esbench.schema import Case
from impls import Population, perturb
from impls.benchmark import inputs
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.scheme import AbstractAdditiveScheme, AbstractScheme, AnyScheme
from impls.verify.checks import Setting, check_purity, check_split
from impls.verify.reference import check_forward, check_update
from tests.schemes.cases import filled, seeded
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


def each(cases: Any, check: Callable[..., None]) -> None:
    """Run a check on every case; the error of one that fails names it."""
    for case in cases:
        try:
            check(*case)
        except Exception as error:  # every error, named and raised again
            error.add_note(f"case {', '.join(map(str, case))}")
            raise


@every_variant
def test_agrees_with_the_reference_on_every_operator(entry: Entry) -> None:
    """Forward, update, moments, purity, splits, antithetic halves and bias noise hold in float64."""
    each(
        ((case,) for case in CHECKS if suits(entry, case)),
        lambda case: build(entry.scheme, case, "cpu", 0).verify(),
    )


@every_variant
def test_errs_at_most_twice_the_reference_in_narrow_types(entry: Entry) -> None:
    """The budget is twice the error of written-out weights in the same type; TF32 has a wider one."""
    is_binary = not suits(entry, NARROW)
    base = msgspec.structs.replace(BITS, repeats=2, bias=True) if is_binary else NARROW
    sides = (False,) if is_binary else (False, True)
    types = ("float32", "bfloat16", "float16", *(() if is_binary else ("tfloat32",)))

    def check(dtype: str, antithetic: bool) -> None:
        case = msgspec.structs.replace(base, dtype=dtype, antithetic=antithetic)
        with precision(dtype):
            build(entry.scheme, case, "cpu", 0).verify()

    each(product(types, sides), check)


@every_scheme
def test_odd_shapes_are_right_or_refused(entry: Entry) -> None:
    """Widths of one and no power of two, one channel, one member: right, or an error with the numbers."""

    def check(model: nn.Module, features: tuple[int, ...], members: int) -> None:
        try:
            population = perturb(filled(model), scheme_of(entry), members=members, sigma=0.1)
        except ValueError as error:
            refusal = str(error)
        else:
            refusal = ""
        if refusal:
            assert any(character.isdigit() for character in refusal), refusal
            return
        x = seeded(members, *features)
        check_forward(population, x, range(members))
        check_update(population, x, range(members))

    layers = [(nn.Linear(i, o), (i,)) for o, i in ((1, 1), (1, 5), (5, 1), (3, 7), (17, 33))]
    each(((*layer, members) for layer in layers for members in (1, 3)), check)
    check(nn.Conv2d(1, 1, (2, 3), padding=1), (1, 4, 5), 2)


@every_scheme
def test_agrees_with_the_reference_with_philox(entry: Entry) -> None:
    """With the counter-based stream too, and there the population may be split at any member."""

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
    whole = population.dense_noise(population.sample(3))
    for ends in ((0, 1, 7), (0, 3, 4, 7), (0, 6, 7)):
        parts = [population.sample(3, members[a:b]) for a, b in pairwise(ends)]
        written = [population.dense_noise(part) for part in parts]
        for name, values in whole.items():
            assert torch.equal(values, torch.cat([part[name] for part in written])), ends


ONE_OF_A_CLASS = {type(entry.scheme): entry for entry in ENTRIES}.values()


@pytest.mark.parametrize("entry", ONE_OF_A_CLASS, ids=lambda entry: entry.variant.name)
def test_a_compiled_forward_agrees_with_the_eager_one(entry: Entry) -> None:
    """The trace of a grouped convolution, antithetic, computes the same; so does that of a Linear layer."""
    convolution = nn.Conv2d(6, 8, 3, groups=2, bias=False)
    signed = torch.tensor([0.1, -0.1]).view(2, 1, 1, 1, 1, 1)
    cases: list[tuple[AbstractOperator, nn.Module, tuple[int, ...], float | Tensor]] = [
        (Conv2d(groups=2), convolution, (2, 3, 5, 5), signed)
    ]
    if isinstance(entry.scheme, AbstractAdditiveScheme):
        # A product that adds to its output has a path for a number and one for a tensor.
        linear = nn.Linear(6, 8, bias=False)
        cases += [(Linear(), linear, (1, 6), scale) for scale in (0.1, signed.view(2, 1, 1, 1))]

    def check(
        op: AbstractOperator, module: nn.Module, features: tuple[int, ...], scale: float | Tensor
    ) -> None:
        population = perturb(filled(module, torch.float32), scheme_of(entry), members=4, sigma=0.1)
        noise, layer = population.sample(0).layers[""].weight, population.layers[0]
        weight, x = layer.grouped(layer.weight.detach().clone()), seeded(2, 4, *features).float()

        def forward(x: Tensor) -> Tensor:
            return scheme_of(entry).forward(op, weight, noise, x, scale)

        torch.compiler.reset()
        with torch.no_grad():
            compiled: Any = torch.compile(forward, backend="aot_eager")
            torch.testing.assert_close(compiled(x), forward(x), rtol=1e-5, atol=1e-5)

    each(cases, check)


def test_utilities_of_any_size_are_scaled_before_they_meet_a_narrow_type() -> None:
    """A gradient that float16 cannot hold is an error, and no infinity."""
    utilities = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)

    def gradient(population: Population, scale: float) -> Tensor:
        population.model.zero_grad()
        noise = population.sample(0)
        _, record = population.call_with_activations(torch.ones(5, 6, dtype=torch.float16), noise)
        population.update(noise, utilities * scale, record)
        grad = population.model.get_parameter("weight").grad
        assert grad is not None
        return grad.double()

    def check(entry: Entry) -> None:
        model = filled(nn.Linear(6, 4), torch.float16)
        population = perturb(model, scheme_of(entry), members=5, sigma=0.1)
        plain = gradient(population, 1.0)
        for scale in (1e3, 1e30, 1e-30):
            if bool((scale * plain.abs() > torch.finfo(torch.float16).max).any()):
                with pytest.raises(ValueError, match=r"does not fit torch\.float16"):
                    gradient(population, scale)
            else:
                torch.testing.assert_close(gradient(population, scale), scale * plain, rtol=2e-3, atol=1e-7)

    each(((entry,) for entry in ENTRIES), check)


def test_an_empty_batch_and_a_layer_that_no_scheme_serves_are_refused() -> None:
    """An error names the rows, or the kind of layer."""

    def check(entry: Entry) -> None:
        population = perturb(nn.Linear(6, 4), scheme_of(entry), members=5, sigma=0.1)
        with pytest.raises(ValueError, match="0 rows"):
            population(torch.empty(0, 6), population.sample(0))
        with pytest.raises(ValueError, match="Embedding"):
            perturb(nn.Embedding(6, 4), scheme_of(entry), members=5, sigma=0.1)

    each(((entry,) for entry in ENTRIES), check)
