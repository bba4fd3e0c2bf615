"""Shared cores (permuted, flipped, Hadamard), one and several: structure, sums and closed forms."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typing_extensions import override

from impls.perturbation.member_ops import (
    add_flipped_signs,
    apply_cores,
    group_by_core,
    member_cores,
    same_core_fraction,
    take_channels,
)
from impls.perturbation.noise import BLOCK
from impls.perturbation.operators import AbstractOperator, Conv2d, Linear
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Flipped, FlippedSign, Hadamard, Permuted, hadamard
from impls.schemes.hadamard import HadamardNoise
from impls.schemes.permuted import PermutedNoise
from impls.verify.checks import Setting, check, check_split
from tests.schemes.cases import CONV, GROUPED, LINEAR, agrees, check_sums, closed, filled, seeded

SIDES: tuple[Literal["in", "out", "both"], ...] = ("in", "out", "both")

SCHEMES: list[Callable[[int], AnyScheme]] = [
    lambda cores: Flipped("in", cores=cores),
    lambda cores: Flipped("both", cores=cores),
    lambda cores: FlippedSign(cores=cores),
    lambda cores: Permuted(in_sparsity=0.5, cores=cores),
    lambda cores: Permuted("out", out_sparsity=0.5, cores=cores),
    lambda cores: Permuted("both", cores=cores),
    lambda cores: Hadamard(cores=cores),
]

PERMUTED: list[dict[str, Any]] = [
    {},
    {"in_sparsity": 0.5},
    {"side": "out"},
    {"side": "out", "out_sparsity": 0.4},
    {"side": "both"},
    {"side": "both", "in_sparsity": 0.5},
    {"side": "both", "in_sparsity": 0.5, "out_sparsity": 0.5},
]

OPERATORS = [
    (Linear(), (1, 3, 4), (4,)),
    (Conv2d(padding=1, groups=2), (2, 3, 2, 3, 3), (2, 5, 4)),
]


# Members and their cores.


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 600),
    total=st.integers(1, 12),
    count=st.integers(1, 7),
    repeats=st.integers(1, 2),
    which=st.sampled_from(OPERATORS),
)
def test_member_j_has_core_j_modulo_their_number(
    start: int,
    total: int,
    count: int,
    repeats: int,
    which: tuple[AbstractOperator, tuple[int, ...], tuple[int, ...]],
) -> None:
    """In products, in dense noise and in sums, in any part of a population."""
    op, shape, features = which
    cores = seeded(count, *shape, seed=start)
    x = seeded(repeats, total, shape[0], *features, seed=start + 1)
    members = range(start, start + total)
    alone = [op.apply_shared(x[:, j : j + 1], cores[m % count]) for j, m in enumerate(members)]
    torch.testing.assert_close(apply_cores(op, x, cores, members), torch.cat(alone, dim=1))
    assert torch.equal(member_cores(cores, members), torch.stack([cores[m % count] for m in members]))
    grouped = group_by_core(torch.arange(1, total + 1), count, members)
    for core in range(count):
        own = [j + 1 for j in range(total) if (start + j) % count == core]
        assert [int(value) for value in grouped[core] if value] == own


@given(members=st.integers(2, 40), cores=st.integers(1, 50))
def test_the_fraction_of_pairs_with_the_same_core(members: int, cores: int) -> None:
    """It is the number of such pairs over the number of all: 1 for one core, 0 where all have their own."""
    same = sum(a % cores == b % cores for a, b in itertools.permutations(range(members), 2))
    assert same_core_fraction(members, cores) == pytest.approx(same / (members * (members - 1)))
    assert same_core_fraction(10**6, cores) == pytest.approx(1 / cores, rel=1e-3)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.tuples(*(st.integers(1, most) for most in (2, 3, 2, 4, 5))),
    space=st.sampled_from([(), (1, 1), (2, 3)]),
)
def test_channels_are_taken_by_each_members_index(sizes: tuple[int, ...], space: tuple[int, ...]) -> None:
    """Taking by index equals indexing row by row, with and without space."""
    repeats, members, groups, channels, size = sizes
    x = torch.randn(repeats, members, groups, channels, *space)
    index = torch.randint(channels, (members, groups, size))
    taken = take_channels(x, index)
    for r, m, g in itertools.product(range(repeats), range(members), range(groups)):
        assert torch.equal(taken[r, m, g], x[r, m, g, index[m, g]])


@pytest.mark.parametrize("make", SCHEMES, ids=lambda make: type(make(1)).__name__)
def test_any_number_of_cores_and_members_is_exact(make: Callable[[int], AnyScheme]) -> None:
    """Cores that do not divide the members or a block, more cores than members, and one member."""
    for cores, members in ((3, 7), (5, 3), (4, 1), (2, 6)):
        check_sums(make(cores), members)
    check_split(Setting(make(3), filled(nn.Linear(5, 4)), (5,)))


def test_members_take_cores_in_turn() -> None:
    """Members whose places differ by the number of cores share one, neighbours do not."""
    population = perturb(nn.Linear(8, 8, bias=False), Flipped("in", cores=3), members=BLOCK + 6, sigma=1.0)
    part = population.sample(0, range(BLOCK, BLOCK + 6))
    size = population.dense_noise(part)["weight"].abs()
    assert torch.equal(size[0], size[3])
    assert not torch.equal(size[0], size[1])
    whole = population.dense_noise(population.sample(0))["weight"].abs()
    assert torch.equal(whole[BLOCK % 3], size[0])


def test_noise_bytes_are_those_of_signs_and_cores() -> None:
    """Signs take a byte each; the cores, or Hadamard's largest factor, are added once."""
    layer = nn.Linear(24, 16, bias=False)
    flips = perturb(layer, Flipped("both", cores=3), members=50, sigma=1.0)
    assert flips.noise_bytes == 50 * (24 + 16) + 3 * layer.weight.nbytes
    population = perturb(nn.Conv2d(24, 16, 3, bias=False), Hadamard(), members=50, sigma=1.0)
    assert population.noise_bytes == 50 * (24 + 16 + 9) + 4 * 32 * 32


# Flipped.


def test_closed_forms_of_flips() -> None:
    """Unflipped length (1 for both sides) times taps, plus 1 for Gaussian cores and minus 1 for signs."""
    for side in SIDES[:2]:
        for cores in (1, 3):
            agrees(FlippedSign(side, cores=cores), GROUPED)
    for shape, taps in ((LINEAR, 1), (CONV, 9)):
        outputs, inputs = shape[:2]
        for side, length in zip(SIDES, (outputs, inputs, 1), strict=True):
            assert closed(Flipped(side), shape, 64) == length * taps + 1
            assert closed(FlippedSign(side), shape, 64) == length * taps - 1
    assert closed(Flipped("in", cores=32), (64, 64), 2**20) == pytest.approx(65 / 32, rel=1e-3)
    assert closed(Flipped("in", cores=64), (64, 64), 64) == 0


def test_flipped_signs_are_added_in_any_dtype() -> None:
    """Adding keeps the dtype, for a number and a tensor of signed sigmas; entries are signs."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        y, values = torch.ones(2, 3, 1, 4, dtype=dtype), torch.full((2, 3, 1, 4), 2.0, dtype=dtype)
        signs = torch.tensor([1, -1, 1, -1], dtype=torch.int8).expand(3, 1, 4)
        expected = torch.tensor([2.0, 0.0, 2.0, 0.0], dtype=dtype).expand(2, 3, 1, 4)
        for sigma in (0.5, torch.full((2, 1, 1, 1), 0.5, dtype=dtype)):
            assert torch.equal(add_flipped_signs(y.clone(), values.clone(), signs, sigma), expected)
    schemes: list[AnyScheme] = [*(FlippedSign(side, cores=2) for side in SIDES), Hadamard(cores=2)]
    for scheme in schemes:
        population = perturb(nn.Conv2d(4, 6, 3), scheme, members=5, sigma=1.0)
        assert population.dense_noise(population.sample(0))["weight"].abs().eq(1).all()


# Permuted.


def written(scheme: Permuted, outputs: int, inputs: int, members: int = 6) -> Tensor:
    """Write out the members of a Linear layer, [m, o, i]."""
    population = perturb(nn.Linear(inputs, outputs, bias=False), scheme, members=members, sigma=1.0)
    return population.dense_noise(population.sample(0))["weight"]


@pytest.mark.parametrize("options", PERMUTED, ids=str)
def test_a_member_is_the_core_with_its_channels_moved(options: dict[str, Any]) -> None:
    """Members have the same entries, the sparsity's number not zero; sums and kappa agree."""
    scheme = Permuted(**options)
    noise = written(scheme, 10, 8)
    assert torch.equal(noise.flatten(1).sort().values, noise[:1].flatten(1).sort().values.expand(6, 80))
    rows, columns = round(10 * scheme.out_sparsity), round(8 * scheme.in_sparsity)
    assert noise.abs().sum(2).ne(0).sum(1).eq(rows).all()
    assert noise.abs().sum(1).ne(0).sum(1).eq(columns).all()
    for axis, moved in ((1, scheme.side != "out"), (2, scheme.side != "in")):
        sums = noise.abs().sum(axis)
        assert moved != torch.allclose(sums[0], sums[1])
    check_sums(scheme, members=3)
    agrees(Permuted(**options, cores=3), GROUPED)


def test_closed_forms_of_permutations() -> None:
    """To leading order o taps / k for inputs and i taps / k for outputs; (3 taps + 4) / (o i) for both."""
    wide = (1000, 500)
    assert closed(Permuted(), wide, 64) == pytest.approx(1000 / 500, rel=0.01)
    assert closed(Permuted(in_sparsity=0.1), wide, 64) == pytest.approx(1000 / 50, rel=0.01)
    assert closed(Permuted("out", out_sparsity=100), wide, 64) == pytest.approx(500 / 100, rel=0.02)
    assert closed(Permuted(), (*wide, 3, 3), 64) == pytest.approx(9 * 1000 / 500, rel=0.01)
    assert closed(Permuted("both"), (*wide, 3, 3), 64) == pytest.approx(31 / (1000 * 500), rel=0.01)
    # Centring leaves what differs between cores: two cores give back little at k = i, a half at small k.
    for sparsity, share in ((1.0, 0.75), (0.05, 0.5 + 0.25 * 0.05)):
        one, two = (
            closed(Permuted(in_sparsity=sparsity, cores=cores), (2000, 1000), 10**6) for cores in (1, 2)
        )
        assert two / one == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("side", SIDES)
def test_the_closed_form_is_that_of_all_permutations(side: Any) -> None:
    """Every pick of a 3 x 3 layer, enumerated for many cores: only the mean over cores is estimated."""
    width, kept, cores = 3, 2, 8000
    ways_in = ways_out = [tuple(range(width))]
    if side != "out":
        ways_in = list(itertools.permutations(range(width), kept))
    if side != "in":
        ways_out = list(itertools.permutations(range(width)))
    core = torch.randn(cores, width, len(ways_in[0]), generator=torch.Generator().manual_seed(0))
    core[:, kept if side != "in" else width :] = 0
    noise = torch.stack(
        [
            core.new_zeros(cores, width, width).index_add_(2, torch.tensor(places), core[:, rows]).flatten(1)
            for rows, places in itertools.product(ways_out, ways_in)
        ],
        dim=1,
    )
    noise -= noise.mean(1, keepdim=True)
    second = noise.mT @ noise / noise.shape[1]
    squares, traces = second.square().sum((1, 2)), second.diagonal(dim1=1, dim2=2).sum(1)
    value = width**2 * float(squares.mean() / traces.mean() ** 2)
    error = value * float((squares / squares.mean() - 2 * traces / traces.mean()).std()) / cores**0.5
    options = {f"{one}_sparsity": kept for one in ("in", "out") if side in {one, "both"}}
    expected = closed(Permuted(side, **options), (width, width), 10**6)
    assert error < 0.03 * value
    assert abs(value - 1 - expected) <= 4 * error, f"{value - 1:.3f} +- {error:.3f}, closed {expected:.3f}"


@pytest.mark.parametrize(("side", "shape"), [("in", (4, 1)), ("out", (1, 4)), ("both", (1, 1))])
def test_one_channel_cannot_be_permuted(side: Any, shape: tuple[int, int]) -> None:
    """Members of one core are all the same, nothing is learned, and there is no kappa."""
    noise = written(Permuted(side), *shape)
    assert torch.equal(noise, noise[:1].expand_as(noise))
    assert Permuted(side).kappa(torch.empty(1, *shape), 6) is None


def test_permuting_both_sides_has_an_even_variance() -> None:
    """Over all permutations of a small core, each entry meets each place equally often."""
    scheme = Permuted("both", in_sparsity=2, out_sparsity=1)
    population = perturb(nn.Linear(3, 2, bias=False), scheme, members=4000, sigma=1.0)
    noise = population.sample(0).layers[""].weight
    assert isinstance(noise, PermutedNoise)
    places = [
        [*rows, *columns]
        for rows in itertools.permutations(range(2))
        for columns in itertools.permutations(range(3), 2)
    ]
    picks = torch.tensor(places)
    every = replace(
        noise, outputs=picks[:, None, :2].clamp(max=1), inputs=picks[:, None, 2:], members=range(len(places))
    )
    second = scheme.dense_noise(every).square().mean(0)
    torch.testing.assert_close(second, second.mean().expand_as(second))
    squares = scheme.dense_noise(noise).square()
    assert (squares.mean(0) - second).abs().le(6 * squares.std(0) / 4000**0.5).all()


# Hadamard.


def factor(outputs: int, inputs: int) -> Tensor:
    """Return the largest factor of a matrix of this size."""
    largest = max(hadamard.hadamard_factors(hadamard.hadamard_width(outputs, inputs)))
    return hadamard.sylvester(largest, device=torch.device("cpu"), dtype=torch.float64)


def check_transform(outputs: int, inputs: int, space: int) -> None:
    """Compare the transform with a product; entry (i, j) is +1 where i & j has an even number of bits."""
    common = torch.arange(outputs).unsqueeze(1) & torch.arange(inputs)
    for shift in (8, 4, 2, 1):
        common = common ^ (common >> shift)
    matrix, x = (1 - 2 * (common & 1)).double(), seeded(2, inputs, space)
    found = hadamard.walsh_hadamard_transform(x, outputs, factor(outputs, inputs))
    torch.testing.assert_close(found, matrix @ x)
    assert torch.equal(hadamard.hadamard_matrix(outputs, inputs, factor(outputs, inputs)), matrix)


@settings(max_examples=60, deadline=None)
@given(outputs=st.integers(1, 200), inputs=st.integers(1, 200), space=st.integers(1, 3))
def test_the_transform_is_a_product_with_sylvesters_matrix(outputs: int, inputs: int, space: int) -> None:
    """For any width, with and without positions."""
    check_transform(outputs, inputs, space)


def test_wide_transforms_take_several_factors() -> None:
    """Also where outputs or inputs are far fewer than the matrix has rows; factors multiply to the width."""
    for outputs, inputs in ((4096, 3), (3, 4096), (5000, 1), (1100, 1030), (1, 8192)):
        for space in (1, 2):
            check_transform(outputs, inputs, space)
    for bits in range(21):
        for most in (hadamard.FACTOR, hadamard.IMAGE_FACTOR):
            factors = hadamard.hadamard_factors(2**bits, most)
            assert torch.tensor(factors).prod() == 2**bits
            assert factors == sorted(factors, reverse=True)
            assert factors[0] <= min(most, 2 * factors[-1], hadamard.hadamard_factors(2**bits)[0])


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 7), (9, 1), (65, 3), (3, 65), (17, 33)])
def test_any_width_is_exact(outputs: int, inputs: int) -> None:
    """Widths of 1 and widths that are no power of two agree with the reference."""
    check(Setting(Hadamard(), filled(nn.Linear(inputs, outputs)), (inputs,)))


def test_rows_in_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU goes through members in pieces that fit its cache: one member at a time gives the same."""
    x, outputs = seeded(4 * 5, 6, 5, 5), []
    for piece in (1, 2**30):
        monkeypatch.setattr(hadamard, "PIECE_BYTES", piece)
        model = filled(nn.Conv2d(6, 4, 3, padding=1, groups=2, bias=False))
        population = perturb(model, Hadamard(cores=2), members=5, sigma=0.5, antithetic=True)
        outputs.append(population(x, population.sample(0)))
    torch.testing.assert_close(outputs[0], outputs[1])


class SharedTaps(Hadamard):
    """Signs for channels only, which the taps share."""

    @override
    def sample(self, weight: Tensor, stream: Any) -> HadamardNoise:
        noise = super().sample(weight, stream)
        if noise.taps is not None:
            noise.taps.fill_(1)
        return noise

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        return weight[0, 0, 0].numel() - 1


def test_kappa_of_hadamard_noise() -> None:
    """It is 0 for a small part of the matrix, and taps - 1 without the taps' own signs."""
    for cores in (1, 3):
        agrees(Hadamard(cores=cores), (5, 3))
    agrees(SharedTaps(), CONV)


def test_cores_bring_fourth_moments_to_those_of_independent_entries() -> None:
    """The inner product of two members has the kurtosis 9 with one core; across cores it falls towards 3."""
    kurtosis = {}
    for cores in (1, 64):
        population = perturb(nn.Linear(16, 16, bias=False), Hadamard(cores=cores), members=64, sigma=1.0)
        values = []
        for step in range(30):
            rows = population.dense_noise(population.sample(step))["weight"].flatten(1)
            values.append((rows @ rows.mT)[~torch.eye(64, dtype=torch.bool)])
        products = torch.cat(values)
        kurtosis[cores] = float(products.pow(4).mean() / products.square().mean() ** 2)
    assert kurtosis[1] > 6
    assert kurtosis[64] < 4
