"""Bugs found in other implementations, each planted once: the correctness checks find them."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls.perturbation import function_mode
from impls.perturbation.member_ops import append_axes
from impls.perturbation.noise import BLOCK, BlockStream, NoiseStream
from impls.perturbation.operators import AbstractOperator, Conv2d
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Flipped, Permuted, Perturbed, SparsePerturbed
from impls.schemes.dense import DenseNoise
from impls.schemes.flipped import FlippedNoise
from impls.schemes.permuted import PermutedNoise
from impls.schemes.sparse import SparseNoise
from impls.verify.checks import Setting, check


def linear() -> nn.Module:
    """Make a small layer with a bias, its weights fixed."""
    return fixed(nn.Linear(6, 5))


def fixed(module: nn.Module) -> nn.Module:
    """Fill a module's parameters with fixed values in float64."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return module


def check_linear(scheme: AnyScheme) -> None:
    """Run the correctness checks on a Linear layer."""
    check(Setting(scheme, linear(), (6,)))


@dataclass(frozen=True)
class SquaredUtilities(Flipped):
    """Fitness squared in the two-sided flip update, as NESgpu's Synthetic has it."""

    @override
    def weighted_sum(self, noise: FlippedNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(noise, utilities * utilities.abs())


@dataclass(frozen=True)
class NothingReturned(Flipped):
    """A forward that returns None on one option."""

    @override
    def forward(self, *args: Any) -> Tensor:
        return None  # type: ignore[return-value]  # the planted bug


@dataclass(frozen=True)
class MissingOutputFlip(Flipped):
    """Signs of the outputs are drawn and summed but not applied."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        return super().correction(op, replace(noise, outputs=None), x)


@dataclass(frozen=True)
class MissingRescale(SparsePerturbed):
    """Sparse values without sqrt(i / k): the noise is weaker than it says."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> SparseNoise:
        noise = super().sample(weight, stream)
        return replace(noise, values=noise.values * (self.k / noise.inputs) ** 0.5)


@dataclass(frozen=True)
class DroppedCorrection(Flipped):
    """The unperturbed output is returned."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        return torch.zeros_like(super().correction(op, noise, x))


@dataclass(frozen=True)
class LostDuplicates(SparsePerturbed):
    """Columns that several members share are overwritten instead of summed."""

    @override
    def weighted_sum(self, noise: SparseNoise, utilities: Tensor) -> Tensor:
        _, groups, _, *rest = noise.values.shape
        weighted = (noise.values * append_axes(utilities, noise.values)).flatten(0, 2)
        total: Tensor = weighted.new_zeros(groups * noise.inputs, *rest)
        total[noise.columns.flatten()] = weighted
        return total.unflatten(0, (groups, noise.inputs)).transpose(1, 2)


@dataclass(frozen=True)
class ReplayedNoise(Perturbed):
    """The seed is kept, so that every step replays the same noise."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return super().sample(weight, replace(stream, step=0))


@dataclass(frozen=True)
class GlobalGenerator(Perturbed):
    """Noise from the global generator."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return DenseNoise(torch.randn(len(stream.members), *weight.shape, dtype=weight.dtype))


@dataclass(frozen=True)
class OtherNoiseInUpdate(Perturbed):
    """The update sums noise that the forward did not use."""

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(replace(noise, values=noise.values.roll(1, 0)), utilities)


def narrowed(noise: DenseNoise) -> DenseNoise:
    """Lose the low bits of noise, as a cast to float32 and back does."""
    return replace(noise, values=noise.values.float().double())


@dataclass(frozen=True)
class LowBitsLostInForward(Perturbed):
    """The forward reads noise whose low bits are lost, the update has them all."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        return super().forward(op, weight, narrowed(noise), x, sigma)


@dataclass(frozen=True)
class LowBitsLostInUpdate(Perturbed):
    """The update sums noise whose low bits are lost, the forward had them all."""

    @override
    def weighted_sum(self, noise: DenseNoise, utilities: Tensor) -> Tensor:
        return super().weighted_sum(narrowed(noise), utilities)


@dataclass(frozen=True)
class SplitDependent(Perturbed):
    """Noise that depends on where the call starts instead of on the block."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        return super().sample(weight, replace(stream, members=range(len(stream.members))))


@dataclass(frozen=True)
class WrongStride(Permuted):
    """Both sides permuted, and the update reads the inputs' picks for the outputs."""

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        assert noise.outputs is not None
        return super().weighted_sum(replace(noise, outputs=noise.outputs.flip(-1)), utilities)


@dataclass(frozen=True)
class EqualMembers(Perturbed):
    """All members share one draw, however the population is split."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DenseNoise:
        shared = stream.shared().normal("dense", *weight.shape)[0]
        return DenseNoise(shared.expand(len(stream.members), *weight.shape).clone())


@dataclass(frozen=True)
class ReseededForward(Flipped):
    """The forward seeds the global generator."""

    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return super().correction(op, noise, x)


@dataclass(frozen=True)
class WiderOutput(Flipped):
    """The output comes in another type."""

    @override
    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args).float()


BUGS: dict[str, tuple[AnyScheme, str]] = {
    "squared utilities": (SquaredUtilities("both"), "update"),
    "None from forward": (NothingReturned(), "forward returned NoneType"),
    "missing output flip": (MissingOutputFlip("both"), "forward"),
    "missing rescale": (MissingRescale(2), "variance"),
    "dropped correction": (DroppedCorrection(), "forward"),
    "unaccumulated duplicates": (LostDuplicates(1), "update"),
    "noise replayed every step": (ReplayedNoise(), "between steps"),
    "the global generator": (GlobalGenerator(), "off|global|different noise"),
    "other noise in the update": (OtherNoiseInUpdate(), "update"),
    "noise that the forward rounds": (LowBitsLostInForward(), "forward is off"),
    "noise that the update rounds": (LowBitsLostInUpdate(), "update of weight is off"),
    "noise that depends on the split": (SplitDependent(), "split"),
    "equal members": (EqualMembers(), "two members have the same noise"),
    "a generator seeded in the forward": (ReseededForward(), "forward advanced torch's global"),
    "an output of another type": (WiderOutput(), "float32, expected torch.float64"),
    "permute-both update indexed wrongly": (WrongStride("both"), "update"),
}


@pytest.mark.parametrize("name", BUGS)
def test_the_oracle_finds_a_planted_bug(name: str) -> None:
    """A scheme with a known mistake is refused, with words about what is wrong."""
    scheme, words = BUGS[name]
    with pytest.raises((WrongResultError, TypeError), match=words):
        check_linear(scheme)


def test_the_oracle_finds_a_lost_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that forgets its stride gives outputs of another shape."""

    def without_stride(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, *rest: Any) -> Any:  # noqa: ARG001  torch's signature
        return function_mode.Call(Conv2d(1, *rest), x, bias)

    handlers: dict[Any, Any] = {**function_mode.HANDLERS, nn.functional.conv2d: (1, without_stride)}
    monkeypatch.setattr(function_mode, "HANDLERS", handlers)
    setting = Setting(Perturbed(), fixed(nn.Conv2d(2, 3, 2, stride=2)), (2, 5, 5))
    with pytest.raises(WrongResultError, match="shape"):
        check(setting)


def test_the_oracle_finds_a_seed_reused_across_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that draw the same noise are found by their correlation."""
    original = BlockStream._key  # noqa: SLF001  the key is what the bug is planted in

    def without_layer(self: BlockStream, draw: str, block: int) -> int:
        return original(replace(self, layer=""), draw, block)

    monkeypatch.setattr(BlockStream, "_key", without_layer)
    with pytest.raises(WrongResultError, match="between layers"):
        check_linear(Perturbed())


def test_the_oracle_finds_a_stream_shared_by_weight_and_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias noise that repeats the weight's is found by its correlation."""
    original = BlockStream._key  # noqa: SLF001  the key is what the bug is planted in

    def without_kind(self: BlockStream, draw: str, block: int) -> int:
        return original(replace(self, layer=self.layer.removesuffix(".bias") + ".weight"), draw, block)

    def one_stream(self: BlockStream, draw: str, block: int) -> int:
        return without_kind(replace(self, layer=self.layer.removesuffix(".weight")), draw, block)

    monkeypatch.setattr(BlockStream, "_key", one_stream)
    with pytest.raises(WrongResultError, match="between weight and bias"):
        check_linear(Perturbed())


def test_the_oracle_finds_lost_bias_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias noise that is summed but not added is found."""
    monkeypatch.setattr(
        "impls.perturbation.operators.Linear.bias", lambda _, bias, y: bias.new_zeros(1, *y.shape[2:])
    )
    with pytest.raises(WrongResultError, match="forward"):
        check_linear(Perturbed())


def test_the_oracle_passes_the_schemes_that_the_bugs_were_planted_in() -> None:
    """The same layers pass without the bugs, so it is the bugs that fail."""
    assert BLOCK > 1
    schemes: list[AnyScheme] = [Flipped("both"), SparsePerturbed(1), Perturbed(), Permuted("both")]
    for scheme in schemes:
        check_linear(scheme)
