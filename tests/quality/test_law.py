"""The quality law: kappa of noise where it is known, of sampled members, and of other update directions."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Generator, Tensor, nn

import impls
from esbench.report.analysis.quality import n_eff_of_replicates
from esbench.workload import UnavailableError
from impls.perturbation.scheme import AnyScheme
from impls.quality import kappa as law
from impls.quality.kappa import Subject, moments, sample_size
from tests.scheme_cases import closed_form, normal

OUT, IN = 12, 20
SIZE = OUT * IN


def independent(count: int, seed: int) -> Tensor:
    """Return independent members [count, d]: kappa is 0."""
    return normal(count, SIZE, seed=seed)


def flipped(count: int, seed: int) -> Tensor:
    """Return members with one shared core and a sign per member and input: kappa is OUT + 1."""
    core, signs = normal(OUT, IN, seed=seed), normal(count, 1, IN, seed=seed + 1).sign()
    return (core * signs).flatten(1)


def flipped_on_both_sides(count: int, seed: int) -> Tensor:
    """Return flipped members with signs for the outputs too: kappa is 2."""
    rows = normal(count, OUT, 1, seed=seed + 2).sign()
    return (flipped(count, seed).view(count, OUT, IN) * rows).flatten(1)


def orthogonal(count: int, seed: int) -> Tensor:
    """Return orthogonal members as long as Gaussian ones: kappa is -1."""
    return torch.linalg.qr(normal(SIZE, count, seed=seed))[0].T * math.sqrt(SIZE)


Draw = Callable[[int, int], Tensor]
LAWS: list[tuple[Draw, float]] = [
    (independent, 0.0),
    (flipped, OUT + 1.0),
    (flipped_on_both_sides, 2.0),
]


def replicates(draw: Draw, count: int, repeats: int, shift: float = 0.0) -> Tensor:
    """Return ``repeats`` estimates of kappa for members with ``shift`` times a common direction added."""
    common = shift * normal(SIZE, seed=999)
    sums_by_step = (moments(draw(count, 10 * seed) + common) for seed in range(repeats))
    return torch.tensor([law.estimate_kappa(sums, SIZE) for sums in sums_by_step])


def error_of_mean(values: Tensor, expected: float) -> float:
    """Return the error of the mean of values, in standard errors."""
    return abs(values.mean().item() - expected) / (values.std().item() / math.sqrt(len(values)))


def test_the_estimate_has_no_bias_and_no_scale() -> None:
    """The estimate is unbiased for few members and independent of scale; too few or equal members raise."""
    assert error_of_mean(replicates(independent, count=8, repeats=400), 0.0) < 4
    assert replicates(orthogonal, count=SIZE // 4, repeats=2).tolist() == pytest.approx([-1.0, -1.0])
    # Subtracting the plain mean of the members instead would give a bias of d / M^2.
    rows = independent(8, 0)
    centered = rows - rows.mean(0)
    products = centered @ centered.T
    of_pairs = products[~torch.eye(8, dtype=torch.bool)]
    naive = float(SIZE * of_pairs.square().mean() / products.diagonal().mean() ** 2 - 1)
    assert naive > 0.5 * SIZE / 8**2
    assert abs(law.estimate_kappa(moments(rows), SIZE)) < 0.5 * naive
    scaled = flipped(32, 5)
    assert law.estimate_kappa(moments(1e-3 * scaled), SIZE) == pytest.approx(
        law.estimate_kappa(moments(scaled), SIZE)
    )
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"needs at least 4 members, got {count}"):
            law.estimate_kappa(moments(independent(count, 0)), SIZE)
    equal = normal(1, 50, seed=0).repeat(8, 1)
    with pytest.raises(ValueError, match="the same noise"):
        law.estimate_kappa(moments(equal), 50)
    law.estimate_kappa(moments(equal + 0.1 * torch.eye(8, 50)), 50)
    # The sums are the same, computed from inner products of members or, for many members, of weights.
    many = flipped(80, 3).narrow(1, 0, 60) + 1.0
    padded = torch.cat([many, torch.zeros(80, 40)], 1)
    assert tuple(moments(many)) == pytest.approx(tuple(moments(padded)))


def cosines(draw: Draw, count: int, seed: int, gradients: int) -> Tensor:
    """Measure cos^2 of the estimate and the gradient for random linear fitnesses, with centered utilities."""
    rows, truth = draw(count, seed), normal(SIZE, gradients, seed=seed + 7)
    utilities = rows @ truth
    estimates = rows.T @ (utilities - utilities.mean(0))
    return torch.nn.functional.cosine_similarity(estimates, truth, dim=0).square()


@pytest.mark.parametrize(("draw", "kappa"), LAWS)
def test_the_estimate_and_the_law_are_right_for_known_noise(draw: Draw, kappa: float) -> None:
    """The estimate finds kappa, also with a common direction added; cos^2 is 1 / (1 + kappa + d / n)."""
    for shift in (0.0, 3.0):
        values = replicates(draw, count=48, repeats=60, shift=shift)
        # The squared length of a finite core varies, which lowers kappa + 1 by a factor of 1 + 2 / d.
        exact = (kappa + 1) / (1 + 2 / SIZE) - 1 if draw is not independent else kappa
        assert error_of_mean(values, exact) < 4
        assert values.std() / math.sqrt(60) < 0.02 * (1 + kappa)
    for share in (0.25, 1, 8):
        count, repeats = int(share * SIZE), 24
        means = [cosines(draw, count, 100 * seed, gradients=40).mean() for seed in range(repeats)]
        expected = 1 / (1 + kappa + SIZE / count)
        error = torch.stack(means).std().item() / math.sqrt(repeats)
        assert abs(torch.stack(means).mean().item() - expected) < 4 * error + 3 / SIZE * expected, share
        assert error < 0.02 * expected, share


def test_n_eff_of_a_kappa() -> None:
    """n_eff is d cos^2 / (1 - cos^2); replicates may be negative and average to n_eff of the mean kappa."""
    for members in (1, 100, 10**6):
        assert law.effective_members(members, SIZE, 0.0) == members
        cosine = 1 / (1 + 3.0 + SIZE / members)
        assert law.effective_members(members, SIZE, 3.0) == pytest.approx(SIZE * cosine / (1 - cosine))
    assert law.effective_members(SIZE // 2, SIZE, -1.0) == SIZE
    assert law.effective_members(4 * SIZE, SIZE, -0.5) == -4 * SIZE
    assert law.effective_members(SIZE, SIZE, -1.0) == SIZE / law.SMALLEST_SHARE
    members, kappas = 16 * SIZE, [0.03, -0.02, 0.05, -0.05, 0.0]
    replicates = [law.effective_members(members, SIZE, kappa) for kappa in kappas]
    exact = law.effective_members(members, SIZE, statistics.mean(kappas))
    assert n_eff_of_replicates(replicates, members).value == pytest.approx(exact)
    assert statistics.mean(replicates) > 1.5 * exact


def test_unseen_bounds_the_share_of_pairs_that_were_not_sampled() -> None:
    """Where similar pairs are too rare to be sampled, the fitted kappa is low by less than ``unseen``."""
    wide = 4000
    columns = torch.randint(wide, (24,), generator=Generator().manual_seed(1))
    assert len(columns.unique()) == len(columns)
    rows = torch.zeros(24, wide)
    rows[torch.arange(24), columns] = 1.0
    sums = moments(rows)
    exact = 0.0  # of all columns: a pair is equal with probability 1 / wide
    assert law.estimate_kappa(sums, wide) < exact - 0.9
    assert law.estimate_kappa(sums, wide) + law.bound_of_rare_pairs([sums], wide) > exact
    assert law.bound_of_rare_pairs([sums] * 5, wide) == pytest.approx(wide * math.log(40) / (5 * 24 * 23 / 2))


# Which members are sampled.


def test_the_number_of_sampled_members() -> None:
    """A sample is at most the population, larger if members outnumber weights, smaller to fit into memory."""
    for members, size, expected in (
        (1, 1, 1),  # the population
        (256, 16384, 128),
        (1024, 2**20, 64),
        (2**16, 576, 7282),  # members outnumber weights
        (2**14, 2**26, 8),  # little memory
    ):
        assert sample_size(members, size) == expected


@pytest.mark.parametrize(
    ("scheme", "width", "members"),
    [(impls.Orthogonal(regenerated=True), 16, 1024), (impls.Flipped(cores=32), 32, 4096)],
    ids=str,
)
def test_sampled_pairs_represent_the_population(
    scheme: AnyScheme, width: int, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kappa depends on the number of members, the sample is chosen from the whole population."""
    monkeypatch.setattr(law, "CHEAP_NOISE_BYTES", 0)
    subject = Subject(nn.Linear(width, width), scheme, members)
    fitted = torch.tensor(
        [law.estimate_kappa(moments(subject.sample(step, 128)), subject.size) for step in range(12)]
    )
    declared, of_sample = (closed_form(scheme, (width, width), count) for count in (members, 128))
    # Biases have dense noise of kappa 0: kappa is the mean over all entries.
    expected = declared * width**2 / subject.size
    error = fitted.std().item() / len(fitted) ** 0.5
    assert abs(fitted.mean().item() - expected) < 5 * error
    assert error < 0.2 * (1 + abs(expected))
    assert abs(of_sample - declared) > 5 * error


def test_a_population_too_large_to_choose_from_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A population too large to sample from is unavailable, unless a smaller one has the same kappa."""
    monkeypatch.setattr(law, "MAX_NOISE_BYTES", 1000)
    with pytest.raises(UnavailableError, match="4096"):
        Subject(nn.Linear(32, 32), impls.Flipped(cores=32), 4096).sample(0, 64)
    assert len(Subject(nn.Linear(32, 32), impls.Flipped(), 4096).sample(0, 64)) == 64


# Updates that sum other directions than the noise.


def logits(out: int, inp: int, scale: float = 1.0) -> nn.Module:
    """Return a binarized layer with seeded logits."""
    module = impls.BinarizedLinear(inp, out, bias=False)
    with torch.no_grad():
        module.get_parameter("weight").copy_(scale * normal(out, inp, seed=0))
    return module


def test_kappa_of_a_mixture_predicts_its_cosines() -> None:
    """Kappa of a mixture follows from the update's cosine over random linear fitnesses, within 5 %."""
    members, size, steps = 256, 12 * 16, 16
    subject = Subject(logits(12, 16), impls.BinaryMixture(group=4), members)
    along = across = 0.0
    of_all, of_samples = [], []
    for step in range(steps):
        noise, directions = (subject.sample(step, members, update_directions=each) for each in (False, True))
        gradients = normal(size, 400, seed=step).float()
        c = noise @ gradients
        estimates = directions.T @ (c - c.mean(0))
        along += float((estimates * gradients).sum(0).mean()) / steps
        across += float(estimates.square().sum(0).mean()) / steps
        of_all.append(law.estimate_kappa_of_update(noise, directions, members))
        sample = torch.randperm(members, generator=Generator().manual_seed(step))[:128]
        of_samples.append(law.estimate_kappa_of_update(noise[sample], directions[sample], members))
    expected = size * across / along**2 - 1 - size / members
    assert sum(of_all) / steps == pytest.approx(expected, rel=0.05)
    fitted = torch.tensor(of_samples)
    assert abs(fitted.mean() - expected) < 4 * fitted.std() / math.sqrt(steps) + 0.06 * (1 + expected)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_kappa_of_independent_bits_depends_on_their_variances(scale: float) -> None:
    """Kappa of independent bits is 0 if all are fair, and grows as their probabilities approach 0 or 1."""
    subject = Subject(logits(24, 20, scale), impls.Binary(), 128)
    values = torch.tensor(law.fit_kappa(subject, [law.sample_moments(subject, step) for step in range(20)]))
    declared = law.declared_kappa(subject)
    assert declared is not None
    assert abs(values.mean() - declared) < 4 * values.std() / math.sqrt(20)
    assert declared == pytest.approx({0.0: 0.0, 1.0: 0.047, 4.0: 0.73}[scale], abs=0.15 * scale)
