"""Low-rank, orthogonal and sparse noise: regenerated factors, rounds of members, columns."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from impls import BLOCK, LowRank, LowRankSign, Orthogonal, SparsePerturbed, perturb
from impls.perturbation.member_ops import MAX_SEPARATE_TERMS
from impls.perturbation.noise import BlockStream
from impls.perturbation.operators import Linear
from impls.quality.kappa import effective_members
from impls.schemes.lowrank import AbstractLowRank, Factors
from impls.schemes.lowrank_addmm import AddmmLowRank
from impls.schemes.orthogonal import MEMBERS_PER_DRAW
from impls.schemes.sparse import MAX_SINGLE_DRAWS, SparseNoise
from impls.verify.reference import check_close, check_forward, check_update, compute_update
from tests.scheme_cases import check_sums, closed_form, dense_rows, fill, make_stream, normal

STORED: list[LowRank | LowRankSign | Orthogonal] = [
    LowRank(2),
    LowRank(2, values="uniform"),
    LowRankSign(),
    Orthogonal(2),
]


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_regenerated_factors_are_the_stored_ones(stored: LowRank | LowRankSign | Orthogonal) -> None:
    """Noise, outputs and updates of both forms agree, over several blocks, in parts and with any stream."""
    members, model = 2 * BLOCK + 3, fill(nn.Linear(5, 4))
    x, utilities = normal(members, 5), normal(members)
    for stream in ("block", "philox"):
        storing, regenerated = (
            perturb(model, scheme, members=members, sigma=0.1, stream=stream, warn=False)
            for scheme in (stored, replace(stored, regenerated=True))
        )
        noise, redrawn = storing.sample(3), regenerated.sample(3)
        bits = storing.dense_noise(noise)
        for name, values in regenerated.dense_noise(redrawn).items():
            assert torch.equal(values, bits[name])
        assert torch.equal(storing(x, noise=noise), regenerated(x, noise=redrawn))
        expected = compute_update(storing, noise, utilities)["weight"]
        check_close("update", compute_update(regenerated, redrawn, utilities)["weight"], expected, expected)
        assert torch.equal(regenerated.dense_noise(redrawn, 100, 120)["weight"], bits["weight"][100:120])
    # With philox a part may start and end inside blocks.
    piece = regenerated.dense_noise(regenerated.sample(3, range(30, BLOCK + 7)))["weight"]
    assert torch.equal(piece, bits["weight"][30 : BLOCK + 7])


@pytest.mark.parametrize("rank", [MAX_SEPARATE_TERMS, MAX_SEPARATE_TERMS + 1])
def test_any_rank_and_memory_layout_is_right(rank: int) -> None:
    """Few and many terms agree with the reference, and images with channels last have the same outputs."""
    check_sums(LowRank(rank))
    module = fill(nn.Conv2d(4, 6, (2, 3), 2, groups=2))
    population = perturb(module, LowRank(rank), members=3, sigma=0.1, antithetic=True)
    x, noise = normal(12, 4, 5, 6), population.sample(0)
    channels_last = population(x.to(memory_format=torch.channels_last), noise=noise)
    torch.testing.assert_close(channels_last, population(x, noise=noise))


@pytest.mark.parametrize(("scheme", "excess"), [(LowRank(1), 2.0), (LowRank(1, values="uniform"), 0.8)])
def test_the_length_of_a_product_varies_with_the_law_of_its_factors(scheme: LowRank, excess: float) -> None:
    """The mean of |E_m|^4 is o i (o + 2) (i + 2) for normal factors, and with 0.8 for uniform ones."""
    lengths = dense_rows(scheme, (1, 2, 3), range(50_000)).square().sum(1)
    expected = 2 * 3 * (2 + excess) * (3 + excess)
    squares = lengths.square()
    assert abs(squares.mean().item() - expected) < 4 * squares.std().item() / 50_000**0.5
    assert squares.std().item() / 50_000**0.5 < 0.03 * expected


# Orthogonal.

SHAPES = [
    (1, 6, 10),
    (1, 10, 6),
    (1, 8, 8),
    (2, 4, 3, 2, 2),
    (1, 1, 7),
    (1, 5, 1),
    (1, 1, 1),
    (3, 1, 1, 3, 3),
]


def draw_factors(scheme: AbstractLowRank, shape: tuple[int, ...], members: int) -> Factors:
    """Draw the factors of members for a weight of that shape, in float64."""
    return scheme.factors(torch.Size(shape), make_stream(range(members)))


def products_per_group(shape: tuple[int, ...], rows: Tensor) -> Tensor:
    """Return inner products of members within each group, [g, m, m], divided by the group's weights."""
    groups = rows.unflatten(1, (shape[0], -1)).transpose(0, 1)
    return groups @ groups.mT / groups.shape[2]


def assert_identity(products: Tensor) -> None:
    """Assert that inner products are those of orthogonal vectors."""
    expected = torch.eye(products.shape[-1]).double().expand_as(products)
    torch.testing.assert_close(products, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_members_of_a_round_are_orthogonal_in_every_group(rank: int) -> None:
    """Members of a round are orthogonal for any widths and taps, and a member's factors have full rank."""
    for shape in SHAPES:
        pairs = math.prod(shape[1:])
        if rank > pairs:
            with pytest.raises(ValueError, match=f"rank = {rank} is above the {pairs} weights"):
                draw_factors(Orthogonal(rank), shape, 1)
            continue
        round_size = pairs // rank
        rows = dense_rows(Orthogonal(rank), shape, range(3 * round_size))
        for start in range(0, 3 * round_size, round_size):
            assert_identity(products_per_group(shape, rows[start : start + round_size]))
        assert (
            round_size == 1
            or float(products_per_group(shape, rows)[:, :round_size, round_size:].abs().max()) > 0.1
        )
        if rank <= min(shape[1], math.prod(shape[2:])):
            noise = draw_factors(Orthogonal(rank), shape, 2 * round_size)
            for side in (noise.up, noise.down.flatten(3)):
                assert_identity(side @ side.mT / side.shape[3])


def test_a_whole_round_gives_the_gradient_of_a_linear_fitness() -> None:
    """Kappa is -1 for a whole round, whose members sum to the gradient; it is 0 for one member."""
    assert closed_form(Orthogonal(), (6, 10), 1) == closed_form(Orthogonal(), (1, 1), 100) == 0
    assert closed_form(Orthogonal(), (6, 10), 60) == -1
    assert effective_members(30, 60, closed_form(Orthogonal(), (6, 10), 30)) == pytest.approx(60)
    gradient, rows = normal(60), dense_rows(Orthogonal(), (1, 6, 10), range(60))
    torch.testing.assert_close(rows.mT @ (rows @ gradient) / 60, gradient)


def largest_deviation(rank: int, steps: int = 300) -> float:
    """Return the largest deviation of the second moment of any entry of E_m from 1, in standard errors."""
    squares = torch.stack(
        [dense_rows(Orthogonal(rank), (1, 3, 4), range(1), step).square()[0] for step in range(steps)]
    )
    error = squares.std(0) / math.sqrt(steps)
    return float(((squares.mean(0) - 1) / error.clamp_min(1e-12)).abs().max())


def kurtosis_of_products(steps: int = 200) -> float:
    """Return the kurtosis of the members' inner products with a gradient of equal entries."""
    products = torch.stack(
        [dense_rows(Orthogonal(), (1, 16, 16), range(8), step).sum(1) for step in range(steps)]
    )
    return float(products.pow(4).mean() / products.square().mean().square())


def test_no_direction_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries have variance 1, and a constant gradient is spread over members; planted bugs break both."""
    assert largest_deviation(2) < 5
    assert kurtosis_of_products() < 20  # a product of two normal numbers has 9
    signs, integers = BlockStream.signs, BlockStream.integers

    def fix_signs(side: str) -> None:
        def draw_fixed(self: BlockStream, draw: str, *shape: int) -> Tensor:
            values = signs(self, draw, *shape)
            return values.fill_(1) if side in draw else values

        monkeypatch.setattr(BlockStream, "signs", draw_fixed)

    fix_signs("columns")
    assert largest_deviation(2) > 10
    # The constant column of the transform is that gradient, and orthogonal to all others.
    fix_signs("rows")
    assert kurtosis_of_products() > 100
    monkeypatch.setattr(BlockStream, "signs", signs)

    def draw_one(self: BlockStream, draw: str, high: int, *shape: int) -> Tensor:
        return integers(self, draw, high, *shape).zero_() + 1

    monkeypatch.setattr(BlockStream, "integers", draw_one)
    assert largest_deviation(1) > 10


@pytest.mark.parametrize("width", [1, 20])
def test_any_split_of_orthogonal_members_has_the_bits_of_the_whole(width: int) -> None:
    """Parts within a round, across rounds, and across the rounds drawn in one call have the same bits."""
    members = 2 * MEMBERS_PER_DRAW + 5 if width == 1 else BLOCK + 50
    model = nn.Linear(width, width, bias=False).double()
    population = perturb(model, Orthogonal(), members=members, sigma=0.1, stream="philox", warn=False)
    bits = population.dense_noise(population.sample(1))["weight"]
    ends = itertools.pairwise((0, 7, BLOCK - 1, members - 2, members))
    parts = [population.dense_noise(population.sample(1, range(*pair)))["weight"] for pair in ends]
    assert torch.equal(torch.cat(parts), bits)


# Sparse.


def draw_sparse(scheme: SparsePerturbed, shape: tuple[int, ...], members: int) -> SparseNoise:
    """Draw members' noise for a weight of that shape, in float64."""
    return scheme.sample(torch.zeros(shape, dtype=torch.float64), make_stream(range(members)))


@pytest.mark.parametrize(("k", "stream"), [(2, "block"), (3, "philox")])
def test_every_choice_of_columns_in_every_order_is_equally_likely(k: int, stream: str) -> None:
    """Columns are drawn without replacement and uniformly, by a chi-squared test."""
    width, members = 4, 6000
    noise = SparsePerturbed(k).sample(torch.zeros(1, 1, width), make_stream(range(members), name=stream))
    counts = Counter(map(tuple, noise.columns[:, 0].tolist()))
    orders = list(itertools.permutations(range(width), k))
    assert set(counts) == set(orders)
    expected, freedom = members / len(orders), len(orders) - 1
    squares = sum((counts[order] - expected) ** 2 / expected for order in orders)
    assert squares < freedom + 4 * (2 * freedom) ** 0.5


def test_sparse_columns_and_values() -> None:
    """A member has k distinct columns in every group, up to all; signs have one size, sqrt(i / k)."""
    for k in (1, 2, MAX_SINGLE_DRAWS, MAX_SINGLE_DRAWS + 1, MAX_SINGLE_DRAWS + 2):
        columns = draw_sparse(SparsePerturbed(k), (3, 2, MAX_SINGLE_DRAWS + 2), 300).columns
        assert columns.shape == (300, 3, k)
        assert 0 <= int(columns.min()) <= int(columns.max()) < MAX_SINGLE_DRAWS + 2
        assert bool((columns.sort(-1).values.diff(dim=-1) > 0).all())
    values = draw_sparse(SparsePerturbed(2, "sign"), (1, 5, 8), 20).values
    torch.testing.assert_close(values.abs(), torch.full_like(values, 2.0))
    assert len(values.unique()) == 2


def test_many_columns_agree_with_the_reference() -> None:
    """More columns than are drawn one by one agree with the reference, with normal values and signs."""
    module = fill(nn.Linear(MAX_SINGLE_DRAWS + 3, 4))
    for scheme in (SparsePerturbed(MAX_SINGLE_DRAWS + 1), SparsePerturbed(MAX_SINGLE_DRAWS + 1, "sign")):
        population = perturb(module, scheme, members=3, sigma=0.1, antithetic=True)
        check_forward(population, normal(6, MAX_SINGLE_DRAWS + 3), range(3))
        check_update(population, normal(6, MAX_SINGLE_DRAWS + 3), range(3))


def test_a_product_adds_itself_to_a_low_rank_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's product is computed onto the correction, in one call and without a copy."""
    layer, written = torch.Size((1, 4, 5)), []
    for rank in (1, 3, MAX_SEPARATE_TERMS + 2):
        scheme, x, weight = AddmmLowRank(rank), normal(2, 7, 1, 5), normal(*layer)
        noise = scheme.sample(weight, make_stream(range(7)))
        expected = LowRank(rank).forward(Linear(), weight, noise, x, 0.1)

        def addmm(y: Tensor, left: Tensor, right: Tensor, *, beta: float, out: Tensor) -> Tensor:
            assert out is y
            written.append(y.data_ptr())
            return y.mul_(beta).add_(left @ right)

        monkeypatch.setattr(torch, "addmm", addmm)
        y = scheme.forward(Linear(), weight, noise, x, 0.1)
        torch.testing.assert_close(y, expected)
        assert written.pop() == y.data_ptr()
