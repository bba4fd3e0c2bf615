"""Quality on the digits networks: a scheme's estimate compared with backpropagation's gradient."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import nn

from esbench.errors import UserError
from esbench.registry import REGISTRY
from esbench.schema import PHASES, QUALITY, Case
from esbench.workload import UnavailableError, build
from impls.benchmark import inputs
from impls.benchmark.baselines import Base, Naive
from impls.perturbation.scheme import AbstractRowScheme, AnyScheme
from impls.quality import gradient_cosine
from impls.quality import kappa as law
from impls.quality.gradient_cosine import DigitsFitness
from impls.quality.kappa import Subject
from impls.quality.metrics import digits_metrics
from impls.schemes import Flipped, Perturbed
from tests.workload_cases import ENTRIES, values, workload

DIGITS = tuple(msgspec.structs.replace(case, members=12) for case in REGISTRY.find_suite("digits").cases)
CNN = DIGITS[1]
ROW_SCHEMES = [entry.scheme for entry in ENTRIES if isinstance(entry.scheme, AbstractRowScheme)]


def fitness_of(scheme: AnyScheme, members: int, seed: int = 0) -> DigitsFitness:
    """Make the fitness of the small convolutional network with a scheme."""
    return DigitsFitness.of(Subject(inputs.layer(CNN, "cpu", 0), scheme, members, seed=seed))


def test_the_gradient_equals_that_of_backpropagation() -> None:
    """The gradient is backpropagation's of the cross-entropy, in parameter order, and .grad stays unset."""
    fitness = fitness_of(Perturbed(), 4)
    model = fitness.subject.model
    truth = fitness.gradient()
    assert all(parameter.grad is None for parameter in model.parameters())
    nn.functional.cross_entropy(model(fitness.x), fitness.y).backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(truth.float(), torch.cat(gradients), rtol=1e-3, atol=1e-6)
    assert truth.norm() > 0.1


@pytest.mark.parametrize(("scheme", "kappa"), [(Perturbed(), 0.0), (Flipped(side="out"), None)])
def test_a_small_step_obeys_the_law(scheme: AnyScheme, kappa: float | None) -> None:
    """At a small sigma the cosine of independent members is the one that the quality law predicts.

    The cosine of members that share a core is lower, but at least half of the law's prediction.
    """
    members, steps = 256, 6
    fitness = fitness_of(scheme, members)
    size = fitness.subject.size
    cosines = torch.tensor([fitness.cosine(0.003, step) for step in range(steps)])
    error = cosines.std().item() / math.sqrt(steps)
    if kappa is not None:
        assert abs(cosines.mean().item() - (1 + kappa + size / members) ** -0.5) < 4 * error
    else:
        assert cosines.mean() + 4 * error < (1 + size / members) ** -0.5
        declared = law.declared_kappa(fitness.subject)
        assert declared is not None
        assert cosines.mean() + 4 * error > 0.5 * (1 + declared + size / members) ** -0.5
    assert error < 0.1 * cosines.mean()
    if kappa is not None:  # at a large sigma the fitness is curved, and the same cosine is lower
        curved = sum(fitness.cosine(0.3, step) for step in range(3)) / 3
        assert curved < 0.6 * cosines.mean()


def test_an_estimate_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate is repeatable, does not depend on the size of pieces, and leaves existing .grad alone."""
    fitness = fitness_of(Flipped(side="both"), 8)
    model = fitness.subject.model
    before = {name: torch.full_like(parameter, 7.0) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = before[name]
    estimate = fitness.estimate(0.02, 1)
    monkeypatch.setattr(gradient_cosine, "MAX_ROWS", 3 * 2 * 8)
    torch.testing.assert_close(fitness.estimate(0.02, 1), estimate, rtol=1e-4, atol=1e-8)
    assert all(parameter.grad is before[name] for name, parameter in model.named_parameters())
    assert all(bool((gradient == 7).all()) for gradient in before.values())
    assert not torch.allclose(fitness.estimate(0.02, 2), estimate)


@pytest.mark.parametrize("scheme", ROW_SCHEMES, ids=str)
def test_schemes_that_learn_from_rows_get_the_rows_of_all_pieces(
    scheme: AnyScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schemes that learn from rows have the same estimate in pieces as in one go, and it is not zero."""
    fitness = fitness_of(scheme, 8)
    estimate = fitness.estimate(0.02, 0)
    monkeypatch.setattr(gradient_cosine, "MAX_ROWS", 5 * 2 * 8)
    assert float((fitness.estimate(0.02, 0) - estimate).norm()) < 1e-4 * float(estimate.norm())
    assert fitness.cosine(0.02, 0) != 0


def test_metrics_of_a_network() -> None:
    """A network has a cosine for each sigma and n_eff; a single pair has a reason in place of n_eff."""
    subject = Subject(inputs.layer(CNN, "cpu", 0), Perturbed(), 6)
    quality_metrics = list(digits_metrics(subject))
    sigmas = [f"sigma={sigma:g}" for sigma in gradient_cosine.SIGMAS]
    assert [metric.method for metric in quality_metrics] == [*sigmas, "at sigma"]
    assert [metric.metric for metric in quality_metrics] == ["cosine"] * len(sigmas) + ["effective_members"]
    assert all(metric.samples and not metric.reason for metric in quality_metrics)
    *_, alone = digits_metrics(replace(subject, members=1))
    assert "does not point along the gradient" in alone.reason
    for cosine in (0.1, 0.5):
        n_eff = gradient_cosine.effective_members_of_cosine(cosine, 1000)
        assert (1 + 1000 / n_eff) ** -0.5 == pytest.approx(cosine)
    assert gradient_cosine.effective_members_of_cosine(0.0, 1000) == 0


@pytest.mark.parametrize("case", DIGITS, ids=lambda case: case.operator)
@pytest.mark.parametrize(
    "scheme", [Perturbed(), Perturbed(stored="weights"), Flipped(), Base(), Naive()], ids=str
)
def test_a_network_is_measured_as_a_layer_is(case: Case, scheme: object) -> None:
    """A network agrees with the reference in float32, has a layer's phases, and states no minimum work."""
    work = build(scheme, case, "cpu", 0)
    work.verify()
    for phase in PHASES:
        assert work.work(phase) is None
        if phase in work.phases:
            work.enter(phase)
            assert all(bool(tensor.isfinite().all()) for tensor in values(work.phases[phase]()))
            work.confirm(phase)
    work.enter(QUALITY)


def test_without_the_digits_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-learn a case of a network is unavailable, with a reason."""

    def missing(name: str, seed: int, steps: int) -> nn.Module:
        raise UserError(f"pip install scikit-learn for {name} ({seed}, {steps})")

    monkeypatch.setattr(inputs, "trained", missing)
    with pytest.raises(UnavailableError, match="pip install"):
        workload(ENTRIES[0], CNN)
