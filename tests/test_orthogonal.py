"""Orthogonal noise: orthogonal members within a round, and second moments as of independent signs."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from impls import BLOCK, LowRank, Orthogonal, Population, perturb
from impls.perturbation.noise import BlockStream
from impls.quality.kappa import effective_members
from impls.schemes.lowrank import Factors
from impls.schemes.orthogonal import DRAWN
from tests.gradient_cases import fitted_kappa, members_of

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


def factors(scheme: Orthogonal, shape: tuple[int, ...], members: int) -> Factors:
    """Draw the factors of members for a weight of that shape, in float64."""
    weight = torch.zeros(shape, dtype=torch.float64)
    stream = BlockStream(0, 0, "layer", range(members), weight.device, weight.dtype)
    return scheme.factors(weight.shape, stream)


def per_group(shape: tuple[int, ...], rows: Tensor) -> Tensor:
    """Inner products of members within each group, [g, m, m], divided by the group's weights."""
    groups = rows.unflatten(1, (shape[0], -1)).transpose(0, 1)
    return groups @ groups.mT / groups.shape[2]


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_members_of_a_round_are_orthogonal_in_every_group(rank: int) -> None:
    """All of them, for any widths and taps, until the weights are used up; then comes another round."""
    for shape in SHAPES:
        check_rounds(shape, rank)


def check_rounds(shape: tuple[int, ...], rank: int) -> None:
    """Check three rounds of members of a rank, or the error for a rank that is too large."""
    pairs = math.prod(shape[1:])
    if rank > pairs:
        with pytest.raises(ValueError, match=f"rank = {rank} is above the {pairs} weights"):
            factors(Orthogonal(rank), shape, 1)
        return
    room = pairs // rank
    rows = members_of(Orthogonal(rank), shape, range(3 * room))
    for start in range(0, 3 * room, room):
        products = per_group(shape, rows[start : start + room])
        torch.testing.assert_close(products, torch.eye(room).double().expand_as(products), rtol=0, atol=1e-12)
    if room > 1:
        apart = per_group(shape, rows)[:, :room, room:]
        assert float(apart.abs().max()) > 0.1  # other rounds have other bases


def test_a_member_has_different_columns_up_to_the_narrower_width() -> None:
    """Within a member of rank r both factors have r orthogonal columns, as far as the widths allow."""
    shapes = SHAPES[:4]
    for shape, rank in [(one, r + 1) for one in shapes for r in range(min(one[1], math.prod(one[2:])))]:
        drawn = factors(Orthogonal(rank), shape, 2 * math.prod(shape[1:]) // rank)
        for side in (drawn.up, drawn.down.flatten(3)):
            products = side @ side.mT / side.shape[3]
            expected = torch.eye(rank).double().expand_as(products)
            torch.testing.assert_close(products, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounds", [0.5, 1.0, 2.6])
def test_kappa_is_what_a_simulated_linear_fitness_shows(rounds: float) -> None:
    """Within a round, at its very end, and over several with the last one in part."""
    cases: list[tuple[tuple[int, ...], int]] = [
        ((1, 6, 10), 1),
        ((1, 6, 10), 3),
        ((2, 4, 3, 2, 2), 1),
        ((1, 1, 7), 2),
    ]
    for shape, rank in cases:
        members = round(rounds * (math.prod(shape[1:]) // rank))
        scheme = Orthogonal(rank)
        fitted, error = fitted_kappa(scheme, shape, members, tails=0)
        assert abs(fitted - scheme.kappa(torch.Size(shape), members)) < 4 * error + 1e-9, (shape, rank)


def test_a_whole_round_gives_the_gradient_itself() -> None:
    """With as many members as weights a linear fitness hides nothing, and with half of them half is seen."""
    shape, size = (1, 6, 10), 60
    gradient = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = members_of(Orthogonal(), shape, range(size))
    torch.testing.assert_close(rows.mT @ (rows @ gradient) / size, gradient)
    kappa = Orthogonal().kappa(torch.Size(shape), size // 2)
    assert effective_members(size // 2, size, kappa) == pytest.approx(size)


def test_one_member_and_one_weight_share_nothing() -> None:
    """Where no two members are in one round, kappa is 0."""
    assert Orthogonal().kappa(torch.Size((1, 6, 10)), 1) == 0
    assert Orthogonal().kappa(torch.Size((1, 1, 1)), 100) == 0
    assert Orthogonal().kappa(torch.Size((1, 6, 10)), 60) == -1


def worst_moment(scheme: Orthogonal, steps: int = 400) -> float:
    """Return how many standard errors the second moment of any entry of E_m is from 1, at most."""
    shape = (1, 3, 4)
    squares = torch.stack([members_of(scheme, shape, range(1), step).square()[0] for step in range(steps)])
    error = squares.std(0) / math.sqrt(steps)
    return float(((squares.mean(0) - 1) / error.clamp_min(1e-12)).abs().max())


def test_every_entry_has_unit_variance_so_that_no_direction_is_preferred() -> None:
    """Not only all entries together: an update of rank two is not bent towards any of them."""
    assert worst_moment(Orthogonal(2)) < 5  # standard errors, of twelve entries


def without_signs(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """Take the signs of rows or of columns away."""
    original = BlockStream.signs

    def signs(self: BlockStream, draw: str, *shape: int) -> Tensor:
        values = original(self, draw, *shape)
        return values.fill_(1) if of in draw else values

    monkeypatch.setattr(BlockStream, "signs", signs)


def test_bases_without_signs_of_their_columns_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbouring columns of one transform agree in some rows and not in others."""
    without_signs(monkeypatch, "columns")
    assert worst_moment(Orthogonal(2)) > 10  # standard errors


def test_bases_that_begin_at_the_same_column_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column of a transform is larger in some rows than in others."""
    original = BlockStream.integers

    def begun(self: BlockStream, draw: str, high: int, *shape: int) -> Tensor:
        return original(self, draw, high, *shape).zero_() + 1

    monkeypatch.setattr(BlockStream, "integers", begun)
    assert worst_moment(Orthogonal(1)) > 10  # standard errors


def unevenness(steps: int = 300) -> float:
    """Return the kurtosis of what members see of a gradient whose entries are all the same."""
    seen = torch.stack(
        [members_of(Orthogonal(), (1, 16, 16), range(8), step).sum(1) for step in range(steps)]
    )
    return float(seen.pow(4).mean() / seen.square().mean().square())


def test_a_gradient_of_equal_entries_is_not_seen_by_one_member_alone() -> None:
    """What members see of it is spread like a product of two normal numbers, whose kurtosis is 9."""
    assert unevenness() < 20


def test_bases_without_signs_of_their_rows_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constant column of the transform is that gradient, and orthogonal to all others."""
    without_signs(monkeypatch, "rows")
    assert unevenness() > 100


def population(shape: tuple[int, int], members: int, stream: str = "block") -> Population:
    """Make a population of a Linear layer."""
    layer = nn.Linear(*shape, bias=False).double()
    return perturb(layer, Orthogonal(), members=members, sigma=0.1, stream=stream)


@pytest.mark.parametrize("width", [1, 3, 20])
def test_any_split_of_members_has_the_bits_of_the_whole(width: int) -> None:
    """Within a round, across rounds, and across the rounds that are drawn in one go."""
    members = 2 * DRAWN + 5 if width == 1 else BLOCK + 50
    whole = population((width, width), members, stream="philox")
    bits = whole.dense_noise(whole.sample(1))["weight"]
    starts = [0, 7, BLOCK - 1, members - 2, members]
    parts = [
        whole.dense_noise(whole.sample(1, range(start, stop)))["weight"]
        for start, stop in itertools.pairwise(starts)
    ]
    assert torch.equal(torch.cat(parts), bits)


def test_members_are_split_at_blocks_of_the_other_stream_too() -> None:
    """The rounds have nothing to do with blocks."""
    whole = population((5, 3), BLOCK + 9)
    bits = whole.dense_noise(whole.sample(1))["weight"]
    parts = [
        whole.dense_noise(whole.sample(1, part))["weight"] for part in (range(BLOCK), range(BLOCK, BLOCK + 9))
    ]
    assert torch.equal(torch.cat(parts), bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types_are_orthogonal_to_within_their_rounding(dtype: torch.dtype) -> None:
    """Inner products are smaller than roundings of as many terms add up to, and far from random ones."""
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
