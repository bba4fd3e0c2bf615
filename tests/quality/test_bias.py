"""The bias of a scheme: what the mean of its estimates over many steps misses of the gradient."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

import impls
from esbench.report.analysis.quality import estimate
from esbench.report.tables.quality import quality_sections
from esbench.report.tables.ranking import ranking_section
from esbench.workload import WrongResultError
from impls.perturbation.noise import NoiseStream
from impls.perturbation.scheme import AbstractDenseScheme, AnyScheme
from impls.quality.bias import check_steps, draw_steps, estimate_bias, sample_bias
from impls.quality.kappa import Subject
from impls.quality.metrics import quality_metrics
from impls.schemes.compiled import Compiled
from impls.schemes.dense import DenseNoise
from tests.report import ranking_cases
from tests.report.ranking_cases import HADAMARD, SQUARE, one_ranking, quality_row
from tests.scheme_cases import fill, normal
from tests.synthetic import skipped

OUT, IN = 12, 20
SIZE = OUT * IN


@dataclass(frozen=True)
class RowShift(AbstractDenseScheme[DenseNoise]):
    """A scheme that cannot learn: a member shifts all weights of an output row by one number."""

    is_declared: bool = False

    @property
    @override
    def is_biased(self) -> bool:
        return self.is_declared

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        rows = stream.normal("rows", *weight.shape[:2])
        return DenseNoise(rows.view(*rows.shape, *[1] * (weight.dim() - 2)).expand(-1, *weight.shape))

    @override
    def dense_noise(self, noise: DenseNoise) -> Tensor:
        return noise.values


Draw = Callable[[int, int, int], Tensor]


def independent(steps: int, members: int, seed: int) -> Tensor:
    """Return dense noise [steps, members, d]: without a bias."""
    return normal(steps, members, SIZE, seed=seed)


def shifted_rows(steps: int, members: int, seed: int) -> Tensor:
    """Return noise with equal entries in each row of IN weights: the bias is IN - 1."""
    return normal(steps, members, OUT, 1, seed=seed).expand(-1, -1, -1, IN).flatten(2)


def flipped(steps: int, members: int, seed: int) -> Tensor:
    """Return a core for each step and signs for each input: without a bias, though kappa is OUT + 1."""
    signs = normal(steps, members, 1, IN, seed=seed + 1).sign()
    return (normal(steps, 1, OUT, IN, seed=seed) * signs).flatten(2)


@pytest.mark.parametrize(("draw", "bias"), [(independent, 0.0), (flipped, 0.0), (shifted_rows, IN - 1.0)])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_the_interval_covers_the_bias(draw: Draw, bias: float, shift: float) -> None:
    """The mean of 300 estimates is the bias, and 95 % of intervals cover it, also with a common part."""
    common = shift * normal(SIZE, seed=999)
    estimates = [estimate(_bias(draw(10, 6, 10 * seed) + common)) for seed in range(300)]
    means = torch.tensor([each.mean for each in estimates if each])
    assert abs(means.mean() - bias) < 4 * means.std() / math.sqrt(300)
    assert means.std() < 0.15 * (1 + bias)
    covered = sum(abs(each.mean - bias) <= each.reach for each in estimates if each)
    assert covered > 0.92 * 300


def _bias(noise: Tensor) -> tuple[float, ...]:
    return estimate_bias(noise, noise)


@pytest.mark.parametrize("draw", [flipped, shifted_rows])
def test_the_law_of_many_steps(draw: Draw) -> None:
    """The cosine of the mean over T steps follows 1 + bias + (kappa - bias) / T + d / (n T)."""
    members, gradient = 64, normal(SIZE, 200, seed=5)
    bias, kappa = (0.0, OUT + 1.0) if draw is flipped else (IN - 1.0, IN - 1.0)
    for steps in (1, 8, 64):
        noise = draw(steps, members, 7)
        centered = noise - noise.mean(1, keepdim=True)
        estimates = centered.flatten(0, 1).T @ (centered.flatten(0, 1) @ gradient)
        along = (estimates * gradient).sum(0).mean() ** 2 / gradient.square().sum(0).mean()
        expected = 1 + bias + (kappa - bias) / steps + SIZE / (members * steps)
        assert float(estimates.square().sum(0).mean() / along) == pytest.approx(expected, rel=0.15)


def test_directions_of_the_update_count() -> None:
    """An update that sums other directions than the noise has the bias of their covariance."""
    noise = independent(16, 6, 1)
    for kept, bias in ((SIZE, 0.0), (SIZE // 4, 3.0)):
        directions = 5.0 * noise + independent(16, 6, 2)
        directions[:, :, kept:] = 0.0
        assert sum(estimate_bias(noise, directions)) / 16 == pytest.approx(bias, abs=0.15 * (1 + bias))
    for scale in (0.0, 1.0, 4.0):  # logits learn at a rate of dP / dlogit, which is no bias
        model = impls.BinarizedLinear(64, 16)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(scale * normal(*parameter.shape))
        for scheme in (impls.Binary(), impls.BinaryMixture(group=4)):
            check_steps(scheme, model)
            estimated = estimate(sample_bias(Subject(model, scheme, 64)))
            assert estimated
            assert abs(estimated.mean) < max(2 * estimated.reach, 0.2), (scheme, scale)


UNBIASED: list[AnyScheme] = [
    *(
        impls.Perturbed(),
        impls.Regenerated(),
        impls.SparsePerturbed(k=1),
        impls.LowRank(1),
        impls.Orthogonal(),
    ),
    *(
        impls.Hadamard(),
        impls.NoiseTable(4),
        impls.Permuted(),
        impls.Permuted("both"),
        impls.Permuted(cores=3),
    ),
    *(impls.Flipped(), impls.Flipped(side="both"), impls.FlippedSign()),
]
BIASED: list[AnyScheme] = [impls.DropoutMask(), impls.DropConnect(), impls.DropoutBlocks()]


@pytest.mark.parametrize("scheme", UNBIASED, ids=str)
def test_schemes_without_a_bias_pass(scheme: AnyScheme) -> None:
    """Schemes whose covariance over steps is that of dense noise pass at three seeds, and have n_eff."""
    model = fill(nn.Linear(24, 16), torch.float32)
    for seed in range(3):
        check_steps(scheme, model, seed)
        assert _n_eff_reason(scheme, model, seed) == ""


@pytest.mark.parametrize("scheme", [RowShift(), *BIASED], ids=str)
def test_a_bias_has_to_be_declared(scheme: AnyScheme) -> None:
    """A biased scheme has no n_eff; it fails the check unless it declares the bias."""
    model = fill(nn.Linear(24, 16, bias=False), torch.float32)
    declared = RowShift(is_declared=True) if isinstance(scheme, RowShift) else scheme
    check_steps(declared, model)
    assert _n_eff_reason(declared, model, 0).startswith("biased (declared): ")
    undeclared = type("Undeclared", (type(scheme),), {"is_biased": False})(**vars(scheme))
    assert Compiled("DropoutMask").is_biased  # as a wrapped scheme
    for seed in range(3):
        with pytest.raises(
            WrongResultError, match=r"^biased: .* cosine of 0\.\d+ with the gradient: correct"
        ):
            check_steps(undeclared, model, seed)
        assert _n_eff_reason(undeclared, model, seed).startswith("biased: ")


def _n_eff_reason(scheme: AnyScheme, model: nn.Module, seed: int) -> str:
    subject = Subject(model, scheme, 64, seed=seed)
    (row,) = (each for each in quality_metrics(subject) if each.metric == "effective_members")
    return row.reason


def test_a_biased_variant_is_not_ranked() -> None:
    """The row of a biased variant has its kappa and its reason, but no n_eff and no place in the ranking."""
    reason = _n_eff_reason(RowShift(), nn.Linear(24, 16), 0)
    assert "cosine of 0.2" in reason  # 1 / sqrt(24) without biases
    others = [
        row
        for row in ranking_cases.rows()
        if (row.variant, getattr(row, "metric", "")) != (HADAMARD, "effective_members")
    ]
    refused = skipped(HADAMARD, SQUARE, reason, "quality", "linear fitness")
    ranking = one_ranking(ranking_cases.run([*others, refused]))
    (ranked,) = (each for each in ranking.of(SQUARE) if each.variant == HADAMARD)
    assert (ranked.rate, ranked.effective) == (None, None)
    assert ranked.kappa
    assert f"unavailable: {reason}" in "\n".join(ranking_section(ranking, SQUARE).footnotes)


def test_equal_members_have_no_bias() -> None:
    """Equal members have no covariance; directions are the noise itself unless they differ."""
    with pytest.raises(ValueError, match="the same noise"):
        _bias(torch.ones(4, 3, 5))
    drawn, directions = draw_steps(Subject(nn.Linear(6, 5), impls.Perturbed(), 3).population(), range(2))
    assert drawn is directions
    assert drawn.shape == (2, 3, 35)


def test_the_table_of_the_law_shows_the_bias() -> None:
    """The bias is beside kappa with its interval, "-" where it was not measured, absent in older runs."""
    headings = [
        section.blocks[0].table.headings for section in quality_sections(ranking_cases.run(), "Linear")
    ]
    assert not any("bias" in names for names in headings)
    rows = [*ranking_cases.rows(), quality_row(HADAMARD, SQUARE, "bias", "linear fitness", 0.1, 0.2, 0.3)]
    sections = quality_sections(ranking_cases.run(rows), "Linear")
    (table,) = (section.blocks[0].table for section in sections if "bias" in section.blocks[0].table.headings)
    column = dict(
        zip(table.labels, (row[table.headings.index("bias")].text() for row in table.cells), strict=True)
    )
    assert column["HadamardLinear"] == "0.2 ± 0.2"
    assert column["PerturbedLinear"].startswith("-")
