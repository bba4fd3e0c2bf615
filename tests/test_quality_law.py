"""The quality law: the estimate of kappa on noise of known kappa, and the law itself."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor

from esbench.report.analysis.quality import n_eff_of_replicates
from impls.quality import kappa as law
from impls.quality.kappa import moments, sample_size

OUT, IN = 12, 20
SIZE = OUT * IN


def normal(*shape: int, seed: int) -> Tensor:
    """Seeded standard normal values in float64."""
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def independent(count: int, seed: int) -> Tensor:
    """Members [count, d] that share nothing: kappa 0."""
    return normal(count, SIZE, seed=seed)


def flipped(count: int, seed: int) -> Tensor:
    """One shared core with each member's signs for the inputs: kappa OUT + 1."""
    core, signs = normal(OUT, IN, seed=seed), normal(count, 1, IN, seed=seed + 1).sign()
    return (core * signs).flatten(1)


def flipped_on_both_sides(count: int, seed: int) -> Tensor:
    """The same with signs for the outputs too: kappa 2."""
    rows = normal(count, OUT, 1, seed=seed + 2).sign()
    return (flipped(count, seed).view(count, OUT, IN) * rows).flatten(1)


def orthogonal(count: int, seed: int) -> Tensor:
    """Members at right angles to each other, as long as Gaussian ones: kappa -1."""
    return torch.linalg.qr(normal(SIZE, count, seed=seed))[0].T * math.sqrt(SIZE)


Draw = Callable[[int, int], Tensor]
LAWS: list[tuple[Draw, float]] = [
    (independent, 0.0),
    (flipped, OUT + 1.0),
    (flipped_on_both_sides, 2.0),
]


def replicates(draw: Draw, count: int, repeats: int, shift: float = 0.0) -> Tensor:
    """Estimate kappa so often, of members that have ``shift`` times one common direction besides."""
    common = shift * normal(SIZE, seed=999)
    grams = (moments(draw(count, 10 * seed) + common) for seed in range(repeats))
    return torch.tensor([law.kappa(one, SIZE) for one in grams])


def off(values: Tensor, expected: float) -> float:
    """Return how many of its standard errors a mean is off."""
    return abs(values.mean().item() - expected) / (values.std().item() / math.sqrt(len(values)))


@pytest.mark.parametrize(("draw", "kappa"), LAWS)
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_the_estimate_finds_known_laws(draw: Draw, kappa: float, shift: float) -> None:
    """Independent members, flips of one side and of both have their kappa, whatever all have in common."""
    values = replicates(draw, count=48, repeats=60, shift=shift)
    # Of a finite core the square of its length is off by 2 / d, and kappa + 1 with it.
    exact = (kappa + 1) / (1 + 2 / SIZE) - 1 if draw is not independent else kappa
    assert off(values, exact) < 4
    assert values.std() / math.sqrt(60) < 0.02 * (1 + kappa)


def test_members_at_right_angles_have_a_kappa_of_minus_one() -> None:
    """They share less than independent ones: not even by chance."""
    assert replicates(orthogonal, count=SIZE // 4, repeats=2).tolist() == pytest.approx([-1.0, -1.0])


def test_the_estimate_has_no_bias_with_few_members() -> None:
    """Eight members give the same kappa as sixty-four, on average: centring costs nothing."""
    assert off(replicates(independent, count=8, repeats=400), 0.0) < 4


def test_the_plain_mean_is_no_centring() -> None:
    """Subtracting the mean of the members gives a bias of d / M^2, which the estimate does not have."""
    rows = independent(8, 0)
    centred = rows - rows.mean(0)
    products = centred @ centred.T
    apart = products[~torch.eye(8, dtype=torch.bool)]
    naive = float(SIZE * apart.square().mean() / products.diagonal().mean() ** 2 - 1)
    assert naive > 0.5 * SIZE / 8**2
    assert abs(law.kappa(moments(rows), SIZE)) < 0.5 * naive


def test_more_members_than_weights_are_added_up_the_other_way() -> None:
    """The sums are the same from products of members and from products of weights."""
    rows = flipped(40, 3) + 1.0
    few = moments(rows)
    products = rows @ rows.T
    apart = products - products.diag().diag()
    sums = apart.sum(1)
    added = torch.stack([products.trace(), sums.sum(), apart.square().sum(), sums.square().sum()]).tolist()
    assert tuple(few) == pytest.approx((40, *added))
    twice = torch.cat([rows, rows]).narrow(1, 0, 60)
    padded = torch.cat([twice, torch.zeros(80, 40)], 1)
    assert tuple(moments(twice)) == pytest.approx(tuple(moments(padded)))


def test_kappa_has_no_scale() -> None:
    """Noise that is a multiple of other noise has the same kappa, whatever sigma is."""
    rows = flipped(32, 5)
    assert law.kappa(moments(1e-3 * rows), SIZE) == pytest.approx(law.kappa(moments(rows), SIZE))


@pytest.mark.parametrize("count", [1, 3])
def test_a_few_members_have_no_kappa(count: int) -> None:
    """A mean over pairs about their own mean needs four members, and says so."""
    with pytest.raises(ValueError, match=f"needs 4 members, there are {count}"):
        law.kappa(moments(independent(count, 0)), SIZE)


def cosines(draw: Draw, count: int, seed: int, gradients: int) -> Tensor:
    """Measure cos^2 of the estimate and the gradient for random linear fitnesses, with centred utilities."""
    rows, truth = draw(count, seed), normal(SIZE, gradients, seed=seed + 7)
    utilities = rows @ truth
    estimates = rows.T @ (utilities - utilities.mean(0))
    return torch.nn.functional.cosine_similarity(estimates, truth, dim=0).square()


@pytest.mark.parametrize(("draw", "kappa"), LAWS)
def test_the_law_is_that_of_the_cosine(draw: Draw, kappa: float) -> None:
    """From d / 4 to 8 d members cos^2 = 1 / (1 + kappa + d / n), within its standard error and 3 / d."""
    for share in (0.25, 1, 8):
        count, repeats = int(share * SIZE), 24
        means = [cosines(draw, count, 100 * seed, gradients=40).mean() for seed in range(repeats)]
        expected = 1 / (1 + kappa + SIZE / count)
        error = torch.stack(means).std().item() / math.sqrt(repeats)
        assert abs(torch.stack(means).mean().item() - expected) < 4 * error + 3 / SIZE * expected, share
        assert error < 0.02 * expected, share


def test_n_eff_is_what_the_law_says() -> None:
    """n_eff = d cos^2 / (1 - cos^2) at every n, and all members count where kappa is 0."""
    for members in (1, 100, 10**6):
        assert law.effective_members(members, SIZE, 0.0) == members
        cosine = 1 / (1 + 3.0 + SIZE / members)
        assert law.effective_members(members, SIZE, 3.0) == pytest.approx(SIZE * cosine / (1 - cosine))


def test_a_replicate_of_n_eff_may_be_negative() -> None:
    """It is negative for kappa below -d / n, and finite where 1 + kappa n / d is 0."""
    assert law.effective_members(SIZE // 2, SIZE, -1.0) == SIZE
    assert law.effective_members(4 * SIZE, SIZE, -0.5) == -4 * SIZE
    assert law.effective_members(SIZE, SIZE, -1.0) == SIZE / law.SMALLEST_SHARE


def test_averaged_replicates_are_the_law_at_the_mean_kappa() -> None:
    """Many members for their weights and an error of kappa: the reader's n_eff is not above the law's."""
    members, kappas = 16 * SIZE, [0.03, -0.02, 0.05, -0.05, 0.0]
    replicates = [law.effective_members(members, SIZE, kappa) for kappa in kappas]
    exact = law.effective_members(members, SIZE, statistics.mean(kappas))
    assert n_eff_of_replicates(replicates, members).value == pytest.approx(exact)
    assert statistics.mean(replicates) > 1.5 * exact


def test_rare_pairs_that_were_not_met_are_in_what_is_unseen() -> None:
    """Members with one column each of very many meet too rarely: the fit lacks less than is said."""
    wide = 4000
    columns = torch.randint(wide, (24,), generator=Generator().manual_seed(1))
    assert len(columns.unique()) == len(columns)
    rows = torch.zeros(24, wide)
    rows[torch.arange(24), columns] = 1.0
    look = moments(rows)
    exact = wide * (1 / wide) - 1
    assert law.kappa(look, wide) < exact - 0.9
    assert law.kappa(look, wide) + law.unseen([look], wide) > exact
    assert law.unseen([look] * 5, wide) == pytest.approx(wide * math.log(40) / (5 * 24 * 23 / 2))


@pytest.mark.parametrize(
    ("members", "size", "expected"),
    [
        (1, 1, 1),
        (64, 4096, 64),
        (256, 16384, 128),
        (256, 65536, 64),
        (1024, 2**20, 64),
        (2**16, 4096, 1024),
        (2**16, 576, 7282),
        (2**14, 2**26, 8),
    ],
)
def test_the_number_of_sampled_members(members: int, size: int, expected: int) -> None:
    """No more than there are, more where they outnumber weights, fewer where they fill memory."""
    assert sample_size(members, size) == expected
