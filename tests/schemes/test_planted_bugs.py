"""Bugs planted in schemes, many of them found in other implementations: the correctness checks find each."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls.perturbation import function_mode
from impls.perturbation.member_ops import append_axes, group_by_core, sum_outer_products
from impls.perturbation.noise import STREAMS, BlockStream, NoiseStream
from impls.perturbation.operators import AbstractOperator, Conv2d
from impls.perturbation.scheme import AnyScheme
from impls.schemes import (
    DropoutMask,
    Flipped,
    FlippedSign,
    Hadamard,
    LowRank,
    Permuted,
    Perturbed,
    Regenerated,
    SparsePerturbed,
)
from impls.schemes.dense import DenseNoise
from impls.schemes.dropout import DropoutNoise
from impls.schemes.flipped import FlippedNoise
from impls.schemes.hadamard import HadamardNoise
from impls.schemes.lowrank import Factors, RedrawnFactors
from impls.schemes.permuted import PermutedNoise
from impls.schemes.regenerated import StreamNoise
from impls.schemes.sparse import SparseNoise
from impls.verify.checks import Setting, check, check_split
from tests.schemes.cases import check_sums, filled


def check_linear(scheme: AnyScheme, stream: str | None = None) -> None:
    """Run the correctness checks on a Linear layer with a bias."""
    check(Setting(scheme, filled(nn.Linear(6, 5)), (6,), stream=stream))


def squared(utilities: Tensor) -> Tensor:
    """Return utilities that enter twice, with their sign."""
    return utilities * utilities.abs()


class NothingReturned(Flipped):
    """A forward that returns None on one option."""

    @override
    def forward(self, *args: Any) -> Tensor:
        return None  # type: ignore[return-value]  # the planted bug


class WiderOutput(Flipped):
    """The output has another dtype."""

    @override
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args).float()


class MissingOutputFlip(Flipped):
    """Signs of the outputs are drawn and summed but not applied."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        return super().correction(op, replace(noise, outputs=None), x)


class DroppedCorrection(Flipped):
    """The unperturbed output is returned."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        return torch.zeros_like(super().correction(op, noise, x))


class ReseededForward(Flipped):
    """The forward seeds the global generator."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().correction(op, noise, x)


class SquaredFlips(Flipped):
    """Fitness squared in the two-sided flip update, as NESgpu's Synthetic has it."""

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        assert noise.inputs is not None
        assert noise.outputs is not None
        total = torch.zeros_like(noise.core[0])
        parts = (
            group_by_core(part, len(noise.core), noise.members)
            for part in (utilities, noise.outputs, noise.inputs)
        )
        for core, c, r, s in zip(noise.core, *parts, strict=True):
            total += core * append_axes(sum_outer_products(c, r, s * c.view(-1, 1, 1)), core)
        return total


class OneSideSummed(FlippedSign):
    """Only the inputs' signs are in the update, both in the forward."""

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(replace(noise, outputs=None), utilities)


class ShiftedFlips(Flipped):
    """Cores are counted from another member in the update than in the forward."""

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        start = noise.members.start + 1
        shifted = replace(noise, members=range(start, start + len(noise.members)))
        return super().weighted_sum(shifted, utilities)


class ForgottenStart(Flipped):
    """A part of the population counts its cores from its own first member."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        return super().correction(op, replace(noise, members=range(len(noise.members))), x)


class ShiftedPicks(Permuted):
    """Picks are summed for the wrong core."""

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(replace(noise, core=noise.core.roll(1, 0)), utilities)


class OtherPicks(Permuted):
    """The update reads the outputs' picks in another order."""

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        assert noise.outputs is not None
        return super().weighted_sum(replace(noise, outputs=noise.outputs.flip(-1)), utilities)


class WrongStride(Permuted):
    """The update counts places of a row by the number of outputs instead of inputs."""

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        total = super().weighted_sum(noise, utilities)
        return total.transpose(1, 2).reshape(total.shape)


class TapsForgotten(Hadamard):
    """The taps' signs are applied and not summed."""

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        taps = None if noise.taps is None else torch.ones_like(noise.taps)
        return super().weighted_sum(replace(noise, taps=taps), utilities)


class OtherMatrix(Hadamard):
    """The update multiplies by the matrix in its natural order, the forward by its columns in another."""

    @override
    def weighted_sum(self, noise: HadamardNoise, utilities: Tensor) -> Tensor:
        order = torch.arange(noise.inputs.shape[2]).expand(self.cores, noise.inputs.shape[1], -1)
        return super().weighted_sum(replace(noise, order=order), utilities)


class LostDuplicates(SparsePerturbed):
    """Columns that several members share are overwritten instead of summed."""

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        _, groups, _, *rest = noise.values.shape
        weighted = (noise.values * append_axes(utilities, noise.values)).flatten(0, 2)
        total: Tensor = weighted.new_zeros(groups * noise.inputs, *rest)
        total[noise.columns.flatten()] = weighted
        return total.unflatten(0, (groups, noise.inputs)).transpose(1, 2)


class WithReplacement(SparsePerturbed):
    """A member's columns may be the same one."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        columns = stream.integers("columns", weight.shape[2], weight.shape[0], self.k)
        return replace(super().sample(weight, stream), columns=columns)


class SparseWithoutScale(SparsePerturbed):
    """Sparse values without sqrt(i / k): the noise is weaker than it says."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        noise = super().sample(weight, stream)
        return replace(noise, values=noise.values * (self.k / noise.inputs) ** 0.5)


class SquaredSparse(SparsePerturbed):
    """Utilities enter twice."""

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(noise, squared(utilities))


class ReplayedNoise(Perturbed):
    """Every step draws the noise of the first."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return super().sample(weight, replace(stream, step=0))


class SplitDependent(Perturbed):
    """Noise depends on where the call starts instead of on the block."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return super().sample(weight, replace(stream, members=range(len(stream.members))))


class EqualMembers(Perturbed):
    """All members share one draw, however the population is split."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        shared = stream.shared().normal("dense", *weight.shape)[0]
        return DenseNoise(shared.expand(len(stream.members), *weight.shape).clone())


class GlobalGenerator(Perturbed):
    """Noise is drawn from the global generator."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return DenseNoise(torch.randn(len(stream.members), *weight.shape, dtype=weight.dtype))


class OtherNoiseInUpdate(Perturbed):
    """The update sums noise that the forward did not use."""

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(replace(noise, values=noise.values.roll(1, 0)), utilities)


def narrowed(noise: DenseNoise) -> DenseNoise:
    """Lose the low bits of noise, as a cast to float32 and back does."""
    return replace(noise, values=noise.values.float().double())


class LowBitsLostInForward(Perturbed):
    """The forward reads noise without its low bits, the update reads them all."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        return super().forward(op, weight, narrowed(noise), x, sigma)


class LowBitsLostInUpdate(Perturbed):
    """The update sums noise without its low bits, the forward read them all."""

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(narrowed(noise), utilities)


class OtherDraw(Regenerated):
    """The update draws noise that the forward did not."""

    @override
    def weighted_sum(self, noise: StreamNoise, utilities: Tensor) -> Tensor:
        later = replace(noise.stream, step=noise.stream.step + 1)
        return super().weighted_sum(replace(noise, stream=later), utilities)


class PieceByPosition(Regenerated):
    """A piece draws the noise of the first members, wherever it is."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: StreamNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        first = replace(noise, stream=replace(noise.stream, members=range(len(noise.stream.members))))
        return super().forward(op, weight, first, x, sigma)


class RegeneratedGlobally(Regenerated):
    """Noise is drawn from torch's global generator wherever it is read."""

    @override
    def dense_noise(self, noise: StreamNoise) -> Tensor:
        values = super().dense_noise(noise)
        return values if values.is_meta else torch.randn_like(values)


class SquaredFactors(LowRank):
    """Utilities enter with each of the two factors."""

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        return super().weighted_sum(noise, squared(utilities))


class WrongPairs(LowRank):
    """The update pairs a member's factor with its neighbour's."""

    @override
    def weighted_sum(self, noise: Factors | RedrawnFactors, utilities: Tensor) -> Tensor:
        assert isinstance(noise, Factors)
        return super().weighted_sum(Factors(noise.down, noise.up.roll(1, 0)), utilities)


class WrongRanks(LowRank):
    """The forward pairs the first factor of one side with the last of the other."""

    @override
    def forward(
        self,
        op: AbstractOperator,
        weight: Tensor,
        noise: Factors | RedrawnFactors,
        x: Tensor,
        sigma: float | Tensor,
    ) -> Tensor:
        assert isinstance(noise, Factors)
        return super().forward(op, weight, Factors(noise.down, noise.up.flip(2)), x, sigma)


class FactorsWithoutScale(LowRank):
    """Factors without 1 / sqrt(rank): the noise is stronger than it says."""

    @override
    def factors(self, weight: torch.Size, stream: NoiseStream) -> Factors:
        drawn = super().factors(weight, stream)
        return Factors(drawn.down, drawn.up * math.sqrt(self.rank))


reads = list[slice]()


class OtherFactors(LowRank):
    """Every reading of regenerated factors draws others."""

    @override
    def _pieces(self, noise: Factors | RedrawnFactors) -> Iterator[tuple[slice, Factors]]:
        for members, factors in super()._pieces(noise):
            reads.append(members)
            yield members, Factors(factors.down, factors.up.roll(len(reads), -1))


class AnotherMembersGates(DropoutMask):
    """The node gradient uses the gates of the next member."""

    @override
    def node_gradient(
        self, op: Any, weight: Any, noise: DropoutNoise, utilities: Tensor, x: Tensor
    ) -> Tensor:
        return super().node_gradient(op, weight, replace(noise, kept=noise.kept.roll(1, 0)), utilities, x)


class WithoutVariance(DropoutMask):
    """The 1 / v is missing from the node gradient."""

    @override
    def node_gradient(self, op: Any, weight: Any, noise: Any, utilities: Tensor, x: Tensor) -> Tensor:
        return super().node_gradient(op, weight, noise, utilities * self.variance(weight.shape), x)


class SquaredNodes(DropoutMask):
    """Utilities enter twice in the node gradient."""

    @override
    def node_gradient(self, op: Any, weight: Any, noise: Any, utilities: Tensor, x: Tensor) -> Tensor:
        return super().node_gradient(op, weight, noise, squared(utilities), x)


class EqualHalves(DropoutMask):
    """Rows that saw -E are treated as if they had seen E."""

    @override
    def node_gradient(self, op: Any, weight: Any, noise: Any, utilities: Tensor, x: Tensor) -> Tensor:
        first, second = utilities.chunk(2)
        return super().node_gradient(op, weight, noise, torch.cat([first, -second]), x)


@dataclass(frozen=True)
class OtherDeviation(DropoutMask):
    """The declared standard deviation of the noise is a constant."""

    deviation: float = 1.0

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor:
        return torch.full_like(weight, self.deviation)


BUGS: list[tuple[AnyScheme, str]] = [
    (NothingReturned(), "forward returned NoneType"),
    (WiderOutput(), "float32, expected torch.float64"),
    (MissingOutputFlip("both"), "forward"),
    (DroppedCorrection(), "forward"),
    (ReseededForward(), "forward advanced torch's global"),
    (SquaredFlips("both"), "update of weight"),
    (OtherPicks("both"), "update of weight"),
    (LostDuplicates(1), "update of weight"),
    (WithReplacement(4), "forward|update"),
    (SparseWithoutScale(2), "variance"),
    (SparseWithoutScale(2, "sign"), "variance"),
    (SquaredSparse(2, "sign"), "update of weight"),
    (ReplayedNoise(), "between steps"),
    (SplitDependent(), "split"),
    (EqualMembers(), "two members have the same noise"),
    (GlobalGenerator(), "off|global|different noise"),
    (OtherNoiseInUpdate(), "update of weight"),
    (LowBitsLostInForward(), "forward is off"),
    (LowBitsLostInUpdate(), "update of weight is off"),
    (OtherDraw(), "update of weight"),
    (PieceByPosition(), "in parts"),
    (RegeneratedGlobally(), "off|global|different"),
    (SquaredFactors(1), "update of weight"),
    (WrongPairs(1), "update of weight"),
    (WrongRanks(2), "forward"),
    (FactorsWithoutScale(2), "variance"),
    (OtherFactors(1, regenerated=True), "forward|different noise"),
    (AnotherMembersGates(0.3, "out"), "update of weight"),
    (WithoutVariance(0.3, "out"), "update of weight"),
    (SquaredNodes(0.3, "out"), "update of weight"),
    (EqualHalves(0.3, "out"), "update of weight"),
    (OtherDeviation(), "variance"),
    (OtherDeviation(deviation=0.0), "varies"),
]


@pytest.mark.parametrize(("scheme", "words"), BUGS, ids=lambda value: type(value).__name__)
def test_a_planted_bug_is_found(scheme: AnyScheme, words: str) -> None:
    """A scheme with a known mistake is refused, and the message says what is wrong; without it, it passes."""
    streams = STREAMS if isinstance(scheme, Regenerated) else (None,)
    for stream in streams:
        torch.manual_seed(0)
        with torch.random.fork_rng(), pytest.raises((WrongResultError, TypeError), match=words):
            check_linear(scheme, stream)


def test_the_schemes_pass_without_the_bugs() -> None:
    """It is the bugs that fail the check."""
    schemes: list[AnyScheme] = [
        *(Flipped("both"), FlippedSign(), SparsePerturbed(1), Perturbed(), Permuted("both")),
        *(Regenerated(), LowRank(2), DropoutMask(0.3, "out")),
    ]
    for scheme in schemes:
        check_linear(scheme)


@pytest.mark.parametrize(
    "scheme",
    [
        *(SquaredFlips("both", cores=2), OneSideSummed()),
        *(ShiftedFlips("both", cores=2), ShiftedFlips("in", cores=3), ShiftedPicks(cores=2)),
        *(WrongStride("both"), WrongStride("both", cores=2), OtherPicks("out")),
        *(TapsForgotten(), OtherMatrix(cores=2)),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_a_wrong_update_of_cores_is_found(scheme: AnyScheme) -> None:
    """Cores, signs or places mixed up between forward and update, with one core and several."""
    with pytest.raises(WrongResultError, match="update of weight"):
        check_sums(scheme)


def test_cores_counted_from_a_parts_own_start_are_found() -> None:
    """The check of splits finds it where the number of cores does not divide a block."""
    with pytest.raises(WrongResultError, match="forward in parts"):
        check_split(Setting(ForgottenStart("in", cores=3), filled(nn.Linear(5, 4)), (5,)))


# Bugs outside of schemes.


def test_a_lost_stride_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that forgets its stride gives outputs of another shape."""

    def without_stride(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, *rest: Any) -> Any:  # noqa: ARG001  torch's signature
        return function_mode.Call(Conv2d(1, *rest), x, bias)

    handlers: dict[Any, Any] = {**function_mode.HANDLERS, nn.functional.conv2d: (1, without_stride)}
    monkeypatch.setattr(function_mode, "HANDLERS", handlers)
    with pytest.raises(WrongResultError, match="shape"):
        check(Setting(Perturbed(), filled(nn.Conv2d(2, 3, 2, stride=2)), (2, 5, 5)))


@pytest.mark.parametrize("words", ["between layers", "between weight and bias"])
def test_a_seed_that_is_used_twice_is_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers, or a weight and its bias, that draw the same noise are found by their correlation."""
    original = BlockStream._key  # noqa: SLF001  the key is what the bug is planted in

    def key(self: BlockStream, draw: str, block: int) -> int:
        layer = "" if words == "between layers" else self.layer.rpartition(".")[0]
        return original(replace(self, layer=layer), draw, block)

    monkeypatch.setattr(BlockStream, "_key", key)
    with pytest.raises(WrongResultError, match=words):
        check(Setting(Perturbed(), filled(nn.Linear(6, 16)), (6,)))


def test_lost_bias_noise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias noise that is summed but not added is found."""
    monkeypatch.setattr(
        "impls.perturbation.operators.Linear.bias", lambda _, bias, y: bias.new_zeros(1, *y.shape[2:])
    )
    with pytest.raises(WrongResultError, match="forward"):
        check_linear(Perturbed())
