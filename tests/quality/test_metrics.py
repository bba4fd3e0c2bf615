"""Quality metrics of noise, such as spectra and correlations: each one has numbers or a reason."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import Entry
from esbench.schema import QUALITY, Case
from esbench.workload import UnavailableError, build
from impls.perturbation.noise import NoiseStream
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.quality import kappa, metrics
from impls.quality.kappa import Subject, moments
from impls.quality.metrics import quality_metrics
from impls.schemes import (
    DropConnect,
    DropoutBlocks,
    DropoutMask,
    Flipped,
    Permuted,
    Perturbed,
    Regenerated,
    SparsePerturbed,
)
from impls.schemes.dense import DenseNoise
from tests.scheme_cases import fill, normal
from tests.workload_cases import BITS, NUMBERS, every_variant, suits, workload

CASE = Case(operator="Linear", out_channels=12, in_channels=10, members=40, bias=True)
METRICS = {
    ("kappa", "linear fitness"),
    ("kappa", "unseen"),
    ("bias", "linear fitness"),
    ("effective_members", "linear fitness"),
    ("dot_mean", "pairs"),
    ("dot_variance", "pairs"),
    ("largest_change", "one weight"),
    ("singular_values", "one perturbation"),
    ("stable_rank", "one perturbation"),
    ("correlation", "members"),
    ("correlation", "layers"),
    ("correlation", "steps"),
}
"""Metrics of every variant that perturbs; only some variants also have the closed form of kappa."""


def linear(outputs: int = 24, inputs: int = 20) -> nn.Linear:
    """Make a layer with fixed weights and no bias."""
    return fill(nn.Linear(inputs, outputs, bias=False), torch.float32)


def test_inner_products_of_two_members() -> None:
    """Independent members have mean 0 and variance 1 at any scale; sharing raises both."""
    size, count, correlation = 400, 120, 0.5
    mean, variance = metrics.inner_product_moments(moments(3.0 * normal(count, size)), size)
    pairs = count * (count - 1) / 2
    assert abs(mean) < 4 / math.sqrt(pairs)
    assert abs(variance - 1) < 4 * math.sqrt(2 / pairs)
    correlated = moments(
        math.sqrt(1 - correlation) * normal(count, size) + math.sqrt(correlation) * normal(size, seed=1)
    )
    assert metrics.inner_product_moments(correlated, size)[0] / math.sqrt(size) == pytest.approx(
        correlation, abs=0.06
    )
    assert metrics.member_correlation(correlated) == pytest.approx(correlation, abs=0.06)
    flipped = normal(20, 20) * normal(count, 1, 20, seed=1).sign()
    assert metrics.inner_product_moments(moments(flipped.flatten(1)), size)[1] == pytest.approx(22, rel=0.2)


def test_the_largest_change_of_a_weight_is_that_of_any_member() -> None:
    """A few of n columns move by sqrt(n / k), to either side; dense noise by a few standard deviations."""
    changes = {}
    for scheme in (SparsePerturbed(k=2, values="sign"), Perturbed()):
        metric_rows = quality_metrics(Subject(linear(6, 50), scheme, 40))
        changes[scheme] = next(metric.samples for metric in metric_rows if metric.metric == "largest_change")
    assert changes[SparsePerturbed(k=2, values="sign")] == pytest.approx([5.0] * kappa.REPLICATES)
    assert 3 < min(changes[Perturbed()]) <= max(changes[Perturbed()]) < 6
    assert moments(torch.tensor([[1.0, -2.0], [0.5, 0.1]])).largest == 2


@dataclasses.dataclass(frozen=True)
class Replayed(Perturbed):
    """Repeats the noise in every layer and after some steps, which the correlations are meant to find."""

    period: int = 1

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return super().sample(weight, dataclasses.replace(stream, step=stream.step % self.period, layer=""))


def test_equal_noise_of_layers_and_steps_is_a_correlation_of_one() -> None:
    """Noise repeated across layers and steps has a correlation of 1; independent noise has about 0."""
    layers, steps = next(metrics.correlations(Subject(linear(), Replayed(), 8)))
    assert (layers, steps) == pytest.approx((1.0, 1.0))
    layers, steps = next(metrics.correlations(Subject(linear(), Perturbed(), 8)))
    error = 1 / math.sqrt(metrics.CORRELATED_MEMBERS * 480)
    assert abs(layers) < 4 * error
    assert abs(steps) < 4 * error
    _, steps = next(metrics.correlations(Subject(linear(), Replayed(period=2), 8)))
    assert abs(steps) < 4 * error  # successive steps are compared
    # For layers of different shapes, the same stream is found by comparing their first values.
    layers, _ = next(
        metrics.correlations(Subject(nn.Sequential(linear(24, 20), linear(7, 24)), Replayed(), 8))
    )
    assert layers == pytest.approx(1.0)


def test_a_spectrum_is_sorted_and_scaled() -> None:
    """A single column has one singular value; 64 of 100 are kept, in descending order, with mean square 1."""
    values, rank = metrics.spectrum(Subject(linear(), SparsePerturbed(k=1), 8))
    assert rank == pytest.approx(1.0)
    assert values[0] == pytest.approx(math.sqrt(20))
    assert max(values[1:]) < 1e-6
    values, _ = metrics.spectrum(Subject(linear(100, 110), Perturbed(), 8))
    assert len(values) == metrics.MAX_SINGULAR_VALUES
    assert all(earlier >= later for earlier, later in itertools.pairwise(values))
    all_values, _ = metrics.spectrum(Subject(linear(64, 110), Perturbed(), 8))
    assert sum(value**2 for value in all_values) / len(all_values) == pytest.approx(1.0)


def test_sampled_members_are_those_of_the_population(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is the dense noise of random members, repeatable, and does not depend on pieces."""
    subject = Subject(linear(), Flipped(cores=7), 500)
    rows, population = subject.sample(0, 20), subject.population()
    dense = population.dense_noise(population.sample(0))["weight"].flatten(1)
    members = [int((dense == row).all(1).nonzero()[0]) for row in rows]
    assert members == sorted(set(members))
    assert members[-1] > 256
    assert not torch.equal(subject.sample(1, 20), rows)
    for scheme in (Perturbed(), Regenerated()):  # dense noise is drawn for the sample only
        few = Subject(linear(), scheme, 20).population()
        expected = few.dense_noise(few.sample(0))["weight"].flatten(1)
        assert torch.equal(Subject(linear(), scheme, 500).sample(0, 20), expected)
    monkeypatch.setattr("impls.quality.kappa.MAX_PIECE_NUMBERS", 5 * subject.size)
    assert torch.equal(subject.sample(0, 20), rows)


@every_variant
def test_every_variant_has_all_metrics_or_reasons(entry: Entry) -> None:
    """Each metric has finite numbers or a reason, and is the same at a second call after a timed step."""
    for case in (case for case in (CASE, BITS) if suits(entry, case)):
        work = workload(entry, case)
        if entry.variant.mode != "batched":
            with pytest.raises(UnavailableError, match="a plain layer perturbs nothing"):
                list(work.quality())
            continue
        work.enter(QUALITY)
        numbers = list(work.quality())
        by_name = {(metric.metric, metric.method): metric for metric in numbers}
        no_law = (
            {("bias", "linear fitness"), ("effective_members", "linear fitness"), ("kappa", "unseen")}
            if by_name["kappa", "linear fitness"].reason
            else set()
        )
        assert by_name.keys() - {("kappa", "closed form")} == METRICS - no_law
        assert all(math.isfinite(number) for metric in numbers for number in metric.samples)
        assert all(bool(metric.samples) != bool(metric.reason) for metric in numbers)
        work.enter("step")
        work.phases["step"]()
        assert list(work.quality()) == list(build(entry.scheme, case, "cpu", 0).quality()) == numbers


def test_metrics_that_cannot_be_computed_have_reasons() -> None:
    """Too few members, members with equal noise, and noise that is zero have reasons in place of values."""

    def reasons(layer: nn.Module, scheme: AnyScheme, members: int) -> dict[str, str]:
        quality = quality_metrics(Subject(layer, scheme, members))
        return {metric.metric: metric.reason for metric in quality if metric.reason}

    for members in (1, 2, 3):
        few = reasons(linear(), Flipped(), members)
        assert "needs at least 4 members" in few["kappa"]
        assert ("dot_mean" in few) == (members == 1)
        assert "stable_rank" not in few
    assert "all members have the same noise" in reasons(linear(1, 1), Permuted(), 8)["kappa"]
    zero = linear(3, 4)
    nn.init.zeros_(zero.weight)
    for name, words in (("kappa", "is 0 on"), ("dot_mean", "is 0 on"), ("stable_rank", "weight is 0")):
        assert words in reasons(zero, DropConnect(), 8)[name]


SCHEMES = {type(entry.scheme): entry.scheme for entry in NUMBERS if isinstance(entry.scheme, AbstractScheme)}
"""One variant of each scheme."""


@pytest.mark.parametrize(
    ("shape", "members", "weight"), [((1, 1), 4, 1.0), ((1, 3), 2, 1.0), ((1, 3), 1, 0.0), ((3, 1), 4, 0.0)]
)
def test_every_metric_has_numbers_or_a_reason(shape: tuple[int, int], members: int, weight: float) -> None:
    """Layers with one weight, row or column, or with zero weights, have numbers or reasons for any scheme."""
    layer = linear(*shape)
    nn.init.constant_(layer.weight, weight)
    for scheme in SCHEMES.values():
        subject = Subject(layer, scheme, members)
        try:
            subject.population()
        except ValueError:  # the scheme refuses such a layer
            continue
        for metric in quality_metrics(subject):
            assert bool(metric.samples) != bool(metric.reason), (scheme, metric)
            assert all(map(math.isfinite, metric.samples)), (scheme, metric)


def test_the_closed_form_of_a_network_weighs_its_layers() -> None:
    """The closed form of a network is the mean of its layers' kappas, weighted by the layers' sizes."""
    subject = Subject(nn.Sequential(linear(24, 20), linear(7, 24)), Flipped(), 50)
    assert kappa.declared_kappa(subject) == pytest.approx((480 * 25 + 168 * 8) / 648)
    assert subject.size == 648
    # If noise scales with the weight, a mean over sizes is wrong for a second layer or a bias.
    alone = linear(24, 20)
    for scheme in (DropoutMask(), DropConnect(), DropoutBlocks()):
        assert kappa.declared_kappa(Subject(alone, scheme, 50)) is not None
        assert kappa.declared_kappa(Subject(nn.Sequential(alone, linear(7, 24)), scheme, 50)) is None
        assert kappa.declared_kappa(Subject(nn.Linear(20, 24), scheme, 50)) is None
