"""Low-rank, orthogonal and sparse noise: what members share, what is stored, what is never written out."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from impls import BLOCK, LowRank, LowRankSign, Orthogonal, SparsePerturbed, perturb
from impls.perturbation.noise import BlockStream
from impls.quality.kappa import effective_members
from impls.schemes.lowrank import FEW, AbstractLowRank, Factors, RedrawnFactors
from impls.schemes.orthogonal import DRAWN
from impls.schemes.sparse import FEW as FEW_COLUMNS
from impls.schemes.sparse import SparseNoise
from impls.verify.reference import check_forward, check_update, compare, updated
from tests.schemes.cases import GROUPED, agrees, closed, filled, largest, members_of, seeded

STORED: list[LowRank | LowRankSign | Orthogonal] = [LowRank(2), LowRankSign(), Orthogonal(2)]


@pytest.mark.parametrize("stored", STORED, ids=str)
def test_regenerated_factors_are_those_that_are_stored(stored: LowRank | LowRankSign | Orthogonal) -> None:
    """Noise, outputs and updates of both forms agree, over several blocks, in parts and with any stream."""
    again, members, model = replace(stored, regenerated=True), 2 * BLOCK + 3, filled(nn.Linear(5, 4))
    x, utilities = seeded(members, 5), seeded(members)
    for stream in ("block", "philox"):
        whole, redrawn = (
            perturb(model, scheme, members=members, sigma=0.1, stream=stream) for scheme in (stored, again)
        )
        kept, noise = whole.sample(3), redrawn.sample(3)
        assert noise.layers[""].weight.nbytes == 0
        bits, same = whole.dense_noise(kept), redrawn.dense_noise(noise)
        assert all(torch.equal(bits[name], same[name]) for name in bits)
        assert torch.equal(whole(x, kept), redrawn(x, noise))
        expected, got = updated(whole, kept, utilities), updated(redrawn, noise, utilities)
        compare("update", got["weight"], expected["weight"], expected["weight"])
    # A part that starts and ends inside blocks, and noise that is cut.
    part = redrawn.sample(3, range(30, BLOCK + 7))
    assert torch.equal(redrawn.dense_noise(part)["weight"], bits["weight"][30 : BLOCK + 7])
    assert torch.equal(redrawn.dense_noise(noise, 100, 120)["weight"], bits["weight"][100:120])

    for count in (1, BLOCK + 3):
        convolution = filled(nn.Conv2d(4, 6, 2, groups=2))
        population = perturb(convolution, again, members=count, sigma=0.1)
        images, ends = seeded(count, 4, 4, 3), sorted({0, count - 1})
        check_forward(population, images, ends)
        check_update(population, images, ends)


@dataclass(frozen=True)
class WrittenOut(LowRank):
    """Low-rank noise that is materialised, as found in other implementations."""

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        return torch.tensordot(utilities, self.dense_noise(noise), dims=1)


MANY, WIDTH = 256, 48


def test_no_tensor_has_a_number_for_each_member_and_weight() -> None:
    """The largest tensor of draw, forward and update has a factor's numbers, or twice as many in a stream."""
    schemes: list[LowRank | LowRankSign | Orthogonal] = [LowRank(1), LowRank(4), LowRank(FEW + 1)]
    schemes += [LowRank(1, regenerated=True), LowRankSign(), Orthogonal(2)]
    for scheme in schemes:
        assert largest(scheme, MANY, WIDTH) <= 2 * MANY * WIDTH * scheme.rank, scheme
    for sparse in (SparsePerturbed(1), SparsePerturbed(3, "sign")):
        assert largest(sparse, MANY, WIDTH) <= 2 * MANY * WIDTH * sparse.k, sparse
    assert largest(WrittenOut(1), MANY, WIDTH) == MANY * WIDTH * WIDTH
    population = perturb(nn.Linear(6, 5, bias=False), LowRank(3), members=7, sigma=0.1)
    assert population.sample(0).nbytes == 7 * 3 * (6 + 5) * 4


@pytest.mark.parametrize("rank", [FEW, FEW + 1])
@pytest.mark.parametrize(
    ("module", "features"),
    [(nn.Linear(3, 2), (3,)), (nn.Linear(3, 2), (4, 3)), (nn.Conv2d(4, 6, (2, 3), 2, groups=2), (4, 5, 6))],
    ids=["rows", "tokens", "images"],
)
def test_any_rank_and_memory_layout_is_right(rank: int, module: nn.Module, features: tuple[int, ...]) -> None:
    """One pass for each rank and one product for all, ranks above a width, and images with channels last."""
    population = perturb(filled(module), LowRank(rank), members=3, sigma=0.1, antithetic=True)
    x, noise = seeded(12, *features), population.sample(0)
    check_forward(population, x, range(3))
    check_update(population, x, range(3))
    if x.dim() == 4:
        last = population(x.to(memory_format=torch.channels_last), noise)
        torch.testing.assert_close(last, population(x, noise))


def test_signs_make_every_entry_a_sign() -> None:
    """At rank one a perturbation of sign factors is a matrix of signs."""
    population = perturb(filled(nn.Linear(6, 5)), LowRankSign(), members=8, sigma=0.1)
    assert bool(population.dense_noise(population.sample(0))["weight"].abs().eq(1).all())


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


def factors(scheme: AbstractLowRank, shape: tuple[int, ...], members: int) -> Factors:
    """Draw the factors of members for a weight of that shape, in float64."""
    weight = torch.zeros(shape, dtype=torch.float64)
    stream = BlockStream(0, 0, "layer", range(members), weight.device, weight.dtype)
    return scheme.factors(weight.shape, stream)


def per_group(shape: tuple[int, ...], rows: Tensor) -> Tensor:
    """Return inner products of members within each group, [g, m, m], divided by the group's weights."""
    groups = rows.unflatten(1, (shape[0], -1)).transpose(0, 1)
    return groups @ groups.mT / groups.shape[2]


def assert_identity(products: Tensor, size: int) -> None:
    """Assert that inner products are those of orthogonal vectors."""
    torch.testing.assert_close(products, torch.eye(size).double().expand_as(products), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_members_of_a_round_are_orthogonal_in_every_group(rank: int) -> None:
    """For any widths and taps, until all weights are used; then comes another round with other bases."""
    for shape in SHAPES:
        pairs = math.prod(shape[1:])
        if rank > pairs:
            with pytest.raises(ValueError, match=f"rank = {rank} is above the {pairs} weights"):
                factors(Orthogonal(rank), shape, 1)
            continue
        room = pairs // rank
        rows = members_of(Orthogonal(rank), shape, range(3 * room))
        for start in range(0, 3 * room, room):
            assert_identity(per_group(shape, rows[start : start + room]), room)
        assert room == 1 or float(per_group(shape, rows)[:, :room, room:].abs().max()) > 0.1


def test_a_member_has_different_columns_up_to_the_narrower_width() -> None:
    """Within a member of rank r both factors have r orthogonal columns, as far as the widths allow."""
    shapes = SHAPES[:4]
    for shape, rank in [(one, r + 1) for one in shapes for r in range(min(one[1], math.prod(one[2:])))]:
        drawn = factors(Orthogonal(rank), shape, 2 * math.prod(shape[1:]) // rank)
        for side in (drawn.up, drawn.down.flatten(3)):
            assert_identity(side @ side.mT / side.shape[3], rank)


def test_kappa_of_rounds() -> None:
    """Within a round, at its end, and over several; a whole round gives the gradient of a linear fitness."""
    for shape, rank in (((6, 10), 1), ((6, 10), 3), ((2, 4, 3, 2, 2), 1)):
        for rounds in (0.5, 1, 2.6):
            pairs = math.prod(shape[len(shape) == 5 :])
            agrees(Orthogonal(rank), shape, max(4, round(rounds * (pairs // rank))))
    assert closed(Orthogonal(), (6, 10), 1) == closed(Orthogonal(), (1, 1), 100) == 0
    assert closed(Orthogonal(), (6, 10), 60) == -1
    assert effective_members(30, 60, closed(Orthogonal(), (6, 10), 30)) == pytest.approx(60)
    gradient, rows = seeded(60), members_of(Orthogonal(), (1, 6, 10), range(60))
    torch.testing.assert_close(rows.mT @ (rows @ gradient) / 60, gradient)


def worst_moment(rank: int, steps: int = 400) -> float:
    """Return how many standard errors the second moment of any entry of E_m is from 1, at most."""
    squares = torch.stack(
        [members_of(Orthogonal(rank), (1, 3, 4), range(1), step).square()[0] for step in range(steps)]
    )
    error = squares.std(0) / math.sqrt(steps)
    return float(((squares.mean(0) - 1) / error.clamp_min(1e-12)).abs().max())


def unevenness(steps: int = 300) -> float:
    """Return the kurtosis of what members see of a gradient whose entries are all the same."""
    seen = torch.stack(
        [members_of(Orthogonal(), (1, 16, 16), range(8), step).sum(1) for step in range(steps)]
    )
    return float(seen.pow(4).mean() / seen.square().mean().square())


def test_no_direction_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry has unit variance, and a constant gradient is spread over members: each sign is needed."""
    assert worst_moment(2) < 5  # standard errors, of twelve entries
    assert unevenness() < 20  # a product of two normal numbers has 9
    signs, integers = BlockStream.signs, BlockStream.integers

    def without(side: str) -> None:
        def drawn(self: BlockStream, draw: str, *shape: int) -> Tensor:
            values = signs(self, draw, *shape)
            return values.fill_(1) if side in draw else values

        monkeypatch.setattr(BlockStream, "signs", drawn)

    without("columns")
    assert worst_moment(2) > 10
    # The constant column of the transform is that gradient, and orthogonal to all others.
    without("rows")
    assert unevenness() > 100
    monkeypatch.setattr(BlockStream, "signs", signs)

    def first(self: BlockStream, draw: str, high: int, *shape: int) -> Tensor:
        return integers(self, draw, high, *shape).zero_() + 1

    monkeypatch.setattr(BlockStream, "integers", first)
    assert worst_moment(1) > 10


@pytest.mark.parametrize("width", [1, 3, 20])
def test_any_split_of_members_has_the_bits_of_the_whole(width: int) -> None:
    """Within a round, across rounds, and across the rounds that are drawn in one call."""
    members, stop = (2 * DRAWN + 5 if width == 1 else BLOCK + 50), BLOCK + 9
    model = nn.Linear(width, width, bias=False).double()
    for stream, starts in (("philox", [0, 7, BLOCK - 1, members - 2, members]), ("block", [0, BLOCK, stop])):
        whole = perturb(model, Orthogonal(), members=starts[-1], sigma=0.1, stream=stream)
        bits = whole.dense_noise(whole.sample(1))["weight"]
        parts = [
            whole.dense_noise(whole.sample(1, range(*ends)))["weight"] for ends in itertools.pairwise(starts)
        ]
        assert torch.equal(torch.cat(parts), bits)


def test_narrow_dtypes_are_orthogonal_to_within_their_rounding() -> None:
    """Inner products are smaller than roundings of as many terms add up to, and far from random ones."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weight = torch.zeros(1, 12, 16, dtype=dtype)
        stream = BlockStream(0, 0, "layer", range(100), weight.device, dtype)
        off = []
        for scheme in (Orthogonal(), LowRank(1)):
            drawn = scheme.factors(weight.shape, stream)
            rows = torch.einsum("mgko,mgki->moi", drawn.up.double(), drawn.down.double()).flatten(1)
            products = rows @ rows.mT / math.sqrt(rows.shape[1])
            off.append(float((products - products.diag().diag()).square().mean().sqrt()))
        assert off[0] < 4 * torch.finfo(dtype).eps * math.sqrt(weight.numel())
        assert off[0] < 0.1 * off[1]


# Sparse.

VALUES: tuple[Literal["normal", "sign"], ...] = ("normal", "sign")


def sparse(scheme: SparsePerturbed, shape: tuple[int, ...], members: int) -> SparseNoise:
    """Draw members' noise for a weight of that shape, in float64."""
    weight = torch.zeros(shape, dtype=torch.float64)
    return scheme.sample(weight, BlockStream(0, 0, "layer", range(members), weight.device, weight.dtype))


@pytest.mark.parametrize("k", [2, 3])
def test_every_choice_of_columns_in_every_order_is_equally_likely(k: int) -> None:
    """Columns are drawn without replacement, and none is preferred."""
    width, members = 4, 6000
    chosen = Counter(map(tuple, sparse(SparsePerturbed(k), (1, 1, width), members).columns[:, 0].tolist()))
    orders = list(itertools.permutations(range(width), k))
    assert set(chosen) == set(orders)
    expected, freedom = members / len(orders), len(orders) - 1
    squares = sum((chosen[order] - expected) ** 2 / expected for order in orders)
    assert squares < freedom + 4 * (2 * freedom) ** 0.5


def test_sparse_columns_and_values() -> None:
    """A member has k distinct columns in every group, up to all; signs have one size, sqrt(i / k)."""
    for k in (1, 2, FEW_COLUMNS, FEW_COLUMNS + 1, FEW_COLUMNS + 2):
        columns = sparse(SparsePerturbed(k), (3, 2, FEW_COLUMNS + 2), 300).columns
        assert columns.shape == (300, 3, k)
        assert 0 <= int(columns.min()) <= int(columns.max()) < FEW_COLUMNS + 2
        assert bool((columns.sort(-1).values.diff(dim=-1) > 0).all())
    values = sparse(SparsePerturbed(2, "sign"), (1, 5, 8), 20).values
    torch.testing.assert_close(values.abs(), torch.full_like(values, 2.0))
    assert len(values.unique()) == 2


@pytest.mark.parametrize("k", [2, FEW_COLUMNS + 1])
def test_several_columns_are_right_and_split_anywhere(k: int) -> None:
    """Forward and update agree with the reference; a part has the columns and values of the whole."""
    module = filled(nn.Conv2d(2 * FEW_COLUMNS + 2, 4, (2, 3), stride=2, groups=2))
    x = seeded(6, 2 * FEW_COLUMNS + 2, 5, 6)
    for values in VALUES:
        population = perturb(module, SparsePerturbed(k, values), members=3, sigma=0.1, antithetic=True)
        check_forward(population, x, range(3))
        check_update(population, x, range(3))
    members, scheme = BLOCK + 40, SparsePerturbed(k, "sign")
    population = perturb(nn.Linear(FEW_COLUMNS + 3, 4), scheme, members=members, sigma=0.1, stream="philox")
    whole = population.dense_noise(population.sample(0))["weight"]
    part = population.dense_noise(population.sample(0, range(30, members - 3)))["weight"]
    assert torch.equal(part, whole[30 : members - 3])


def test_members_of_any_rank_and_k_are_independent() -> None:
    """Kappa is 0 for ranks and numbers of columns that are not registered, on Linear and in groups."""
    for scheme in (LowRankSign(3), SparsePerturbed(3), SparsePerturbed(3, "sign")):
        agrees(scheme, GROUPED)
