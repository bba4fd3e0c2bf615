"""Bugs planted in schemes, many of them found in other implementations: the correctness checks find each."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esbench.schema import Case
from esbench.workload import WrongResultError, build
from impls.perturbation import function_mode, layer_functions
from impls.perturbation.noise import STREAMS, Noise, NoiseStream
from impls.perturbation.operators import Convolution
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
from impls.schemes.lowrank import Factors, RedrawnFactors
from impls.verify.checks import Setting, check
from tests.scheme_cases import check_sums, fill

Method = Callable[..., Any]
"""A method with a bug; its first argument is the original method of the scheme."""


def run_checks(scheme: AnyScheme, stream: str | None = None) -> None:
    """Run the correctness checks on a Linear layer, then forward and update on a grouped convolution too."""
    check(Setting(scheme, fill(nn.Linear(6, 5)), (6,), stream=stream))
    check_sums(scheme)


def replace_method(scheme: AnyScheme, name: str, method: Method) -> AnyScheme:
    """Return the scheme with one method replaced."""
    original_class = type(scheme)

    def wrong(self: object, *arguments: Any) -> Any:
        return method(partial(getattr(original_class, name), self), *arguments)

    replaced: AnyScheme = type(original_class.__name__, (original_class,), {name: wrong})(**vars(scheme))
    return replaced


def with_noise(**changes: Callable[[Any], Any]) -> Method:
    """Return a method that calls the original with changed fields of the noise."""

    def change(value: Any) -> Any:
        if not isinstance(value, Noise):
            return value
        return replace(value, **{name: change(getattr(value, name)) for name, change in changes.items()})

    return lambda original, *arguments: original(*map(change, arguments))


def with_stream(change: Callable[[NoiseStream], NoiseStream]) -> Method:
    """Return a method ``sample`` that draws from a changed stream."""
    return lambda original, weight, stream: original(weight, change(stream))


def with_utilities(change: Callable[[Tensor], Tensor]) -> Method:
    """Return a method ``weighted_sum`` or ``node_gradient`` with changed utilities."""

    def method(original: Any, *arguments: Any) -> Any:
        position = 1 if len(arguments) == 2 else 3  # (noise, c) or (op, weight, noise, c, x)
        changed = change(arguments[position])
        return original(*arguments[:position], changed, *arguments[position + 1 :])

    return method


def with_result(change: Callable[[Any], Any]) -> Method:
    """Return a method that changes the result of the original."""
    return lambda original, *arguments: change(original(*arguments))


def roll(values: Tensor) -> Tensor:
    """Give each member the noise of its neighbor."""
    return values.roll(1, 0)


def drop_low_bits(values: Tensor) -> Tensor:
    """Lose the low bits, as a cast to float32 and back does."""
    return values.float().double()


def count_from_start(members: range) -> range:
    """Count the members of a part from the start of the part."""
    return range(len(members))


def draw_by_position(stream: NoiseStream) -> NoiseStream:
    """Draw the members of a part as if it were the start of the population."""
    return replace(stream, members=count_from_start(stream.members))


def square(utilities: Tensor) -> Tensor:
    """Multiply by the utilities twice, as NESgpu's Synthetic does."""
    return utilities * utilities.abs()


def seed_globally(original: Any, *arguments: Any) -> Any:
    """Seed the global generator, then call the original."""
    torch.manual_seed(3)
    return original(*arguments)


def double_weight(original: Any, op: object, weight: Tensor, *arguments: Any) -> Any:
    """Leave the model's weight larger after the forward."""
    y = original(op, weight, *arguments)
    weight.mul_(2)
    return y


def clamp_weight(original: Any, weight: Tensor, stream: NoiseStream) -> Any:
    """Clamp the model's weight: only the first call changes it."""
    weight.clamp_(-0.05, 0.05)
    return original(weight, stream)


def clamp_rows(original: Any, op: object, weight: Tensor, noise: object, x: Tensor, *arguments: Any) -> Any:
    """Clamp the input rows in place."""
    return original(op, weight, noise, x.clamp_(-0.5, 0.5), *arguments)


def share_one_draw(_: Any, weight: Tensor, stream: NoiseStream) -> DenseNoise:
    """Share one draw between all members, however the population is split."""
    shared = stream.shared().normal("dense", *weight.shape)[0]
    return DenseNoise(shared.expand(len(stream.members), *weight.shape).clone())


reads: list[slice] = []


def draw_other_factors(original: Any, noise: RedrawnFactors) -> Iterator[Any]:
    """Draw other factors at every reading."""
    for members, factors in original(noise):
        reads.append(members)
        yield members, Factors(factors.down, factors.up.roll(len(reads), -1))


Gates, Cores, UPDATE = DropoutMask(0.3, "out"), Flipped("in", cores=3), "update of weight"

BUGS: list[tuple[str, AnyScheme, str, Method, str]] = [
    ("nothing is returned", Flipped(), "forward", with_result(lambda _: None), "forward returned NoneType"),
    ("another dtype", Flipped(), "forward", with_result(Tensor.float), "float32, expected torch.float64"),
    ("unperturbed output", Flipped(), "correction", with_result(torch.zeros_like), "forward"),
    ("global generator seeded", Flipped(), "correction", seed_globally, "forward advanced torch's global"),
    ("global generator seeded in sample", Perturbed(), "sample", seed_globally, r"sample\(\).* advanced"),
    ("weight left changed", Flipped(), "forward", double_weight, "forward changed weight"),
    ("weight clamped by sample", Perturbed(), "sample", clamp_weight, "sample.*changed weight"),
    ("rows clamped", Flipped(), "forward", clamp_rows, "changed its input rows"),
    ("outputs not flipped", FlippedSign(), "weighted_sum", with_noise(outputs=lambda _: None), UPDATE),
    ("squared utilities", Flipped("both"), "weighted_sum", with_utilities(square), UPDATE),
    ("values of neighbors", Perturbed(), "weighted_sum", with_noise(values=roll), UPDATE),
    ("cores of neighbors", Permuted(cores=2), "weighted_sum", with_noise(core=roll), UPDATE),
    ("taps not flipped", Hadamard(), "weighted_sum",
     with_noise(taps=lambda taps: None if taps is None else torch.ones_like(taps)), UPDATE),
    ("weaker values", SparsePerturbed(2), "sample",
     with_result(lambda noise: replace(noise, values=noise.values * 0.6)), "variance"),
    ("noise of the first step", Perturbed(), "sample",
     with_stream(lambda stream: replace(stream, step=0)), "between steps"),
    ("noise of 256 steps", Perturbed(), "sample",
     with_stream(lambda stream: replace(stream, step=stream.step % 256)), "between steps"),
    ("noise of 65,536 steps", Perturbed(), "sample",
     with_stream(lambda stream: replace(stream, step=stream.step % 2**16)), "between steps"),
    ("noise of 100,000 steps", Perturbed(), "sample",
     with_stream(lambda stream: replace(stream, step=stream.step % 100_000)), "between steps"),
    ("noise of the first seed", Perturbed(), "sample",
     with_stream(lambda stream: replace(stream, seed=0)), "between seeds"),
    ("noise depends on the split", Perturbed(), "sample", with_stream(draw_by_position), "split"),
    ("equal members", Perturbed(), "sample", share_one_draw, "two members have the same noise"),
    ("cores counted from a part's start in the forward", Cores, "correction",
     with_noise(members=count_from_start), "forward.* in parts"),
    ("cores counted from a part's start in the update", Cores, "weighted_sum",
     with_noise(members=count_from_start), "update.* in parts"),
    ("low bits lost in the forward", Perturbed(), "forward",
     with_noise(values=drop_low_bits), "forward is off"),
    ("low bits lost in the update", Perturbed(), "weighted_sum",
     with_noise(values=drop_low_bits), "update of weight is off"),
    ("another draw in the update", Regenerated(), "weighted_sum",
     with_noise(stream=lambda stream: replace(stream, step=stream.step + 1)), UPDATE),
    ("a piece draws by its position", Regenerated(), "forward",
     with_noise(stream=draw_by_position), "in parts"),
    ("noise from the global generator", Regenerated(), "dense_noise",
     with_result(lambda values: values if values.is_meta else torch.randn_like(values)),
     "off|global|different"),
    ("factors of other ranks", LowRank(2), "forward", with_noise(up=lambda up: up.flip(2)), "forward"),
    ("other factors at every reading", LowRank(1, regenerated=True), "_pieces", draw_other_factors,
     "forward|different noise"),
    ("gates of neighbors", Gates, "node_gradient", with_noise(kept=roll), UPDATE),
    ("node gradient without 1 / v", Gates, "node_gradient", with_utilities(lambda c: c * 0.3 / 0.7), UPDATE),
    ("squared node gradient", Gates, "node_gradient", with_utilities(square), UPDATE),
    ("equal antithetic halves", Gates, "node_gradient",
     with_utilities(lambda c: torch.cat([c[: len(c) // 2], -c[len(c) // 2 :]])), UPDATE),
    ("standard deviation of 1", DropoutMask(), "noise_std", with_result(torch.ones_like), "variance"),
    ("standard deviation of NaN", DropoutMask(), "noise_std", with_result(lambda std: std * float("nan")),
     r"noise_std\(\) is not finite for weight"),
    ("standard deviation of 0", DropoutMask(), "noise_std", with_result(torch.zeros_like), "is not 0 where"),
]  # fmt: skip
"""Name, scheme, method, the method with the bug, and a pattern of the error message."""


@pytest.mark.parametrize(("scheme", "method", "wrong", "words"), [bug[1:] for bug in BUGS],
                         ids=[bug[0] for bug in BUGS])  # fmt: skip
def test_a_planted_bug_is_found(scheme: AnyScheme, method: str, wrong: Method, words: str) -> None:
    """The checks fail on a scheme with a known mistake, and the message says what is wrong."""
    error = TypeError if "NoneType" in words else WrongResultError
    for stream in STREAMS if isinstance(scheme, Regenerated) else (None,):
        torch.manual_seed(0)
        with torch.random.fork_rng(), pytest.raises(error, match=words):
            run_checks(replace_method(scheme, method, wrong), stream)


@pytest.mark.parametrize("scheme", dict.fromkeys(bug[1] for bug in BUGS), ids=str)
def test_schemes_without_the_bugs_pass(scheme: AnyScheme) -> None:
    """The same checks pass on the original schemes."""
    run_checks(scheme)


def in_threes(step: int) -> int:
    """Return the first step of three that share their noise, after step 20."""
    return step - step % 3 if step > 20 else step


def share_with_neighbors(original: Any, weight: Tensor, stream: NoiseStream) -> DenseNoise:
    """Seed member m of step s with m + s, as its neighbor at the next step."""
    if stream.device.type == "meta":
        noise: DenseNoise = original(weight, stream)
        return noise
    numbers = [member + int(stream.step) for member in stream.members]
    streams = [replace(stream, step=0, members=range(number, number + 1)) for number in numbers]
    return DenseNoise(torch.cat([each.normal("dense", *weight.shape) for each in streams]))


def keep_core(original: Any, weight: Tensor, stream: NoiseStream) -> Any:
    """Draw new signs at each step, but a new core only at every third."""
    first = original(weight, replace(stream, step=in_threes(int(stream.step))))
    return replace(original(weight, stream), core=first.core)


def shrink_late(original: Any, weight: Tensor, stream: NoiseStream) -> DenseNoise:
    """Halve the noise after step 2000, as annealing does."""
    noise: DenseNoise = original(weight, stream)
    return DenseNoise(noise.values * 0.5) if int(stream.step) > 2000 else noise


def repeat_columns_late(original: Any, weight: Tensor, stream: NoiseStream) -> DenseNoise:
    """Give all inputs of an output the same noise after step 2000."""
    noise: DenseNoise = original(weight, stream)
    late = noise.values[..., :1].expand_as(noise.values).clone()
    return DenseNoise(late) if int(stream.step) > 2000 else noise


@pytest.mark.parametrize(
    ("sample", "words"),
    [(shrink_late, "^variance of the noise of weight is"), (repeat_columns_late, "^biased: the mean")],
)
def test_noise_is_checked_at_late_steps_too(sample: Method, words: str) -> None:
    """A scheme that is right at the first steps alone fails the check."""
    scheme = replace_method(Perturbed(), "sample", sample)
    case = Case(operator="Linear", out_channels=5, in_channels=6, members=8, dtype="float64")
    with pytest.raises(WrongResultError, match=words):
        build(scheme, case, "cpu", 0).verify()


@pytest.mark.parametrize(
    ("scheme", "sample"),
    [
        (Perturbed(), with_stream(lambda stream: replace(stream, step=in_threes(int(stream.step))))),
        (Perturbed(), share_with_neighbors),
        (Flipped(), keep_core),
    ],
    ids=["equal steps", "neighbors of the step before", "equal cores"],
)
def test_noise_of_consecutive_steps_is_independent(scheme: AnyScheme, sample: Method) -> None:
    """A scheme that draws new noise at each of the first steps, and repeats it later, fails the check."""
    case = Case(operator="Linear", out_channels=5, in_channels=6, members=8, dtype="float64", bias=True)
    work = build(replace_method(scheme, "sample", sample), case, "cpu", 0)
    with pytest.raises(WrongResultError, match=r"^consecutive steps have equal or similar noise: draw new"):
        work.verify()
    work.enter("sample")
    with pytest.raises(WrongResultError, match=r"^consecutive steps have"):
        work.confirm("sample")


class Ascent(Perturbed):
    """Members see W - sigma E, and the scheme declares that as their weight: the update climbs."""

    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        """Return the weight of a member, with the sign of its noise reversed."""
        return weight - change

    def forward(self, op: Any, weight: Tensor, noise: DenseNoise, x: Tensor, sigma: float | Tensor) -> Tensor:
        """Compute the forward with the sign reversed."""
        return super().forward(op, weight, noise, x, -sigma)


def test_a_scheme_does_not_choose_what_it_is_compared_with() -> None:
    """Only schemes of binary weights declare other weights than W + sigma E, or other update directions."""
    with pytest.raises(WrongResultError, match=r"^effective_weight\(\) is off"):
        run_checks(Ascent())
    directions = type("Directions", (Perturbed,), {"update_directions_differ": True})
    with pytest.raises(WrongResultError, match="but does not draw binary weights"):
        run_checks(directions())


# Bugs outside of schemes.


def test_a_lost_stride_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that forgets its stride gives outputs of another shape."""

    def without_stride(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, *options: Any) -> Any:  # noqa: ARG001  torch's signature
        return layer_functions.LayerArguments(Convolution(1, *options), x, bias)

    handlers: dict[Any, Any] = {**layer_functions.HANDLERS, nn.functional.conv2d: (1, without_stride)}
    monkeypatch.setattr(function_mode, "HANDLERS", handlers)
    with pytest.raises(WrongResultError, match="shape"):
        check(Setting(Perturbed(), fill(nn.Conv2d(2, 3, 2, stride=2)), (2, 5, 5)))
