"""Figures of the noise: inner products, spectra, correlations, members written out; numbers or reasons."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.registry import REGISTRY, Entry, Figure, UnavailableError, build
from esbench.schema import QUALITY, Case
from impls.perturbation.noise import NoiseStream
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.quality import kappa, metrics
from impls.quality.kappa import PIECE, Subject, moments
from impls.quality.metrics import figures
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
from tests.workload_cases import BITS, NUMBERS, every_variant, suits, workload

CASE = Case(operator="Linear", out_channels=12, in_channels=10, members=40, bias=True)
FIGURES = {
    ("kappa", "linear fitness"),
    ("kappa", "unseen"),
    ("effective_members", "linear fitness"),
    ("dot_mean", "pairs"),
    ("dot_variance", "pairs"),
    ("singular_values", "one perturbation"),
    ("stable_rank", "one perturbation"),
    ("correlation", "members"),
    ("correlation", "layers"),
    ("correlation", "steps"),
}
"""What is said of every variant that perturbs; the closed form of kappa where there is one."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Seeded standard normal values in float64."""
    return torch.randn(*shape, generator=Generator().manual_seed(seed), dtype=torch.float64)


def linear(out: int = 24, inp: int = 20) -> nn.Module:
    """Make a layer with seeded weights and no bias."""
    module = nn.utils.skip_init(nn.Linear, inp, out, bias=False)
    with torch.no_grad():
        module.weight.copy_(normal(out, inp))
    return module


def test_inner_products_of_independent_members() -> None:
    """Mean 0 and variance 1 in units of sqrt(d), within their errors, whatever the scale of the noise."""
    size, count = 400, 120
    mean, variance = metrics.dots(moments(3.0 * normal(count, size)), size)
    pairs = count * (count - 1) / 2
    assert abs(mean) < 4 / math.sqrt(pairs)
    assert abs(variance - 1) < 4 * math.sqrt(2 / pairs)


def test_inner_products_of_members_that_share() -> None:
    """A common part shows in mean and correlation of members, signs of one core in the variance."""
    size, count, part = 400, 80, 0.5
    rows = math.sqrt(1 - part) * normal(count, size) + math.sqrt(part) * normal(size, seed=1)
    products = moments(rows)
    mean, _ = metrics.dots(products, size)
    assert mean / math.sqrt(size) == pytest.approx(part, abs=0.06)
    assert metrics.member_correlation(products) == pytest.approx(part, abs=0.06)
    flipped = normal(20, 20) * normal(count, 1, 20, seed=1).sign()
    _, variance = metrics.dots(moments(flipped.flatten(1)), size)
    assert variance == pytest.approx(22, rel=0.2)


@dataclasses.dataclass(frozen=True)
class Replayed(Perturbed):
    """Every layer and step has the noise of the first: the mistake that the correlations are there for."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return super().sample(weight, dataclasses.replace(stream, step=0, layer=""))


def test_equal_noise_of_layers_and_steps_is_a_correlation_of_one() -> None:
    """Noise that is replayed has correlation 1 across layers and steps; noise that is drawn has about 0."""
    layers, steps = metrics.correlations(Subject(linear(), Replayed(), 8), 0)
    assert (layers, steps) == pytest.approx((1.0, 1.0))
    layers, steps = metrics.correlations(Subject(linear(), Perturbed(), 8), 0)
    error = 1 / math.sqrt(metrics.FEW * 480)
    assert abs(layers) < 4 * error
    assert abs(steps) < 4 * error
    # Layers of other shapes that replay the same stream are found where their first values meet.
    layers, _ = metrics.correlations(Subject(nn.Sequential(linear(24, 20), linear(7, 24)), Replayed(), 8), 0)
    assert layers == pytest.approx(1.0)


def test_spectra() -> None:
    """One column has one singular value; the mean square is 1; of 100 values 64 are kept, in order."""
    values, rank = metrics.spectrum(Subject(linear(), SparsePerturbed(k=1), 8))
    assert rank == pytest.approx(1.0)
    assert values[0] == pytest.approx(math.sqrt(20))
    assert max(values[1:]) < 1e-6
    values, _ = metrics.spectrum(Subject(linear(100, 110), Perturbed(), 8))
    assert len(values) == metrics.SHOWN
    assert all(earlier >= later for earlier, later in itertools.pairwise(values))
    whole, _ = metrics.spectrum(Subject(linear(64, 110), Perturbed(), 8))
    assert sum(value**2 for value in whole) / len(whole) == pytest.approx(1.0)


@pytest.mark.parametrize("scheme", [Perturbed(), Flipped()])
def test_members_are_written_out_as_they_are(scheme: AnyScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are members of the whole population, in pieces of any size, other ones at another step."""
    subject = Subject(linear(), scheme, 16)
    population = subject.population()
    written = population.dense_noise(population.sample(3))["weight"].flatten(1)
    torch.testing.assert_close(subject.sample(3, 16), written, rtol=0, atol=0)
    monkeypatch.setattr("impls.quality.kappa.PIECE", 5 * subject.size)
    torch.testing.assert_close(subject.sample(3, 16), written, rtol=0, atol=0)
    assert not torch.equal(subject.sample(4, 16), written)
    assert subject.size < PIECE


def test_some_members_stand_for_all() -> None:
    """A few of many are drawn from everywhere, the same ones again; of dense noise, stored or not, as few."""
    subject = Subject(linear(), Flipped(cores=7), 500)
    rows, population = subject.sample(0, 20), subject.population()
    written = population.dense_noise(population.sample(0))["weight"].flatten(1)
    places = [int((written == row).all(1).nonzero()[0]) for row in rows]
    assert places == sorted(set(places))
    assert places[-1] > 256
    torch.testing.assert_close(subject.sample(0, 20), rows, rtol=0, atol=0)
    for scheme in (Perturbed(), Regenerated()):
        dense = Subject(linear(), scheme, 500)
        few = dense.population(20)
        expected = few.dense_noise(few.sample(0))["weight"].flatten(1)
        torch.testing.assert_close(dense.sample(0, 20), expected, rtol=0, atol=0)


@every_variant
def test_every_variant_has_all_figures_or_reasons(entry: Entry) -> None:
    """Numbers are finite, equal at a second call, and independent of the steps timed in between."""
    for case in (case for case in (CASE, BITS) if suits(entry, case)):
        work = workload(entry, case)
        if entry.variant.mode != "batched":
            with pytest.raises(UnavailableError, match="a plain layer perturbs nothing"):
                list(work.quality())
            continue
        work.enter(QUALITY)
        found = list(work.quality())
        said = {(one.metric, one.method): one for one in found}
        no_law = (
            {("effective_members", "linear fitness"), ("kappa", "unseen")}
            if said["kappa", "linear fitness"].reason
            else set()
        )
        assert said.keys() - {("kappa", "closed form")} == FIGURES - no_law
        assert all(math.isfinite(number) for one in found for number in one.samples)
        assert all(bool(one.samples) != bool(one.reason) for one in found)
        work.enter("step")
        work.phases["step"]()
        assert list(work.quality()) == list(build(entry.scheme, case, "cpu", 0).quality()) == found


def reason(found: list[Figure], metric: str) -> str:
    """Return why a metric has no number."""
    (words,) = {one.reason for one in found if one.metric == metric}
    return words


def test_figures_that_cannot_be_computed_have_reasons() -> None:
    """Pairs need members, equal members teach nothing, noise of zero weights moves nothing."""
    for members in (1, 2, 3):
        found = list(figures(Subject(linear(), Flipped(), members)))
        reasons = {(one.metric, one.method): one.reason for one in found if one.reason}
        assert "needs at least 4 members" in reasons["kappa", "linear fitness"]
        assert (("dot_mean", "pairs") in reasons) == (members == 1)
        assert ("stable_rank", "one perturbation") not in reasons
    equal = list(figures(Subject(linear(1, 1), Permuted(), 8)))
    assert "all members have the same noise" in reason(equal, "kappa")
    zero = linear(3, 4)
    nn.init.zeros_(zero.get_parameter("weight"))
    found = list(figures(Subject(zero, DropConnect(), 8)))
    assert "noise is zero" in reason(found, "kappa")
    assert "noise is zero" in reason(found, "dot_mean")
    assert "it has no directions" in reason(found, "stable_rank")


SCHEMES = list(dict.fromkeys(entry.scheme for entry in NUMBERS if isinstance(entry.scheme, AbstractScheme)))


@pytest.mark.parametrize(
    ("shape", "members", "fill"),
    [
        ((1, 1), 1, 1.0),
        ((1, 1), 4, 1.0),
        ((1, 3), 2, 1.0),
        ((3, 1), 4, 1.0),
        ((1, 3), 1, 0.0),
        ((3, 1), 4, 0.0),
    ],
)
def test_every_figure_is_numbers_or_a_reason(shape: tuple[int, int], members: int, fill: float) -> None:
    """Of one weight, one row or one column, and of weights that are 0, no scheme's quality raises."""
    layer = nn.Linear(shape[1], shape[0], bias=False)
    nn.init.constant_(layer.weight, fill)
    for scheme in SCHEMES:
        subject = Subject(layer, scheme, members)
        try:
            subject.population()
        except ValueError:  # the scheme refuses such a layer
            continue
        for one in figures(subject):
            assert bool(one.samples) != bool(one.reason), (scheme, one)
            assert all(map(math.isfinite, one.samples)), (scheme, one)


def test_the_closed_form_of_a_network_weighs_its_layers() -> None:
    """It is the mean over all weights: flips of one side, of two layers of other shapes."""
    subject = Subject(nn.Sequential(linear(24, 20), linear(7, 24)), Flipped(), 50)
    assert kappa.closed_form(subject) == pytest.approx((480 * 25 + 168 * 8) / 648)
    assert subject.size == 648
    # A second layer, or a bias, is perturbed as strongly as it is large: no mean over sizes knows that.
    alone = linear(24, 20)
    for scheme in (DropoutMask(), DropConnect(), DropoutBlocks()):
        assert kappa.closed_form(Subject(alone, scheme, 50)) is not None
        assert kappa.closed_form(Subject(nn.Sequential(alone, linear(7, 24)), scheme, 50)) is None
        assert kappa.closed_form(Subject(nn.Linear(20, 24), scheme, 50)) is None


def test_every_operator_of_the_suites_is_in_reach() -> None:
    """The suites that ask for the quality of layers are those whose reports show it."""
    suites = {name: suite for name, suite in REGISTRY.suites.items() if QUALITY in suite.phases}
    asked = {
        name
        for name, suite in suites.items()
        if any(case.operator not in REGISTRY.reserved for case in suite.cases)
    }
    assert asked == {"binary", "quick", "digits", "quality"}
