"""Bugs planted in schemes, many of them found in other implementations: the correctness checks find each."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esbench.registry import WrongResultError
from impls.perturbation import function_mode
from impls.perturbation.member_ops import append_axes, group_by_core, sum_outer_products
from impls.perturbation.noise import STREAMS, BlockStream, Noise, NoiseStream
from impls.perturbation.operators import Conv2d
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
from impls.schemes.dropout import variance
from impls.schemes.flipped import FlippedNoise
from impls.schemes.lowrank import Factors, RedrawnFactors
from impls.schemes.regenerated import StreamNoise
from impls.schemes.sparse import SparseNoise
from impls.verify.checks import Setting, check, check_split
from tests.schemes.cases import check_sums, filled


def check_linear(scheme: AnyScheme, stream: str | None = None) -> None:
    """Run the correctness checks on a Linear layer with a bias."""
    check(Setting(scheme, filled(nn.Linear(6, 5)), (6,), stream=stream))


def planted(scheme: AnyScheme, **methods: Callable[..., Any]) -> AnyScheme:
    """Return the scheme with other methods; each gets the original method before its arguments."""
    kind = type(scheme)

    def replaced(name: str) -> Callable[..., Any]:
        def wrong(self: object, *arguments: Any) -> Any:
            return methods[name](partial(getattr(kind, name), self), *arguments)

        return wrong

    made: AnyScheme = type(kind.__name__, (kind,), {name: replaced(name) for name in methods})(**vars(scheme))
    return made


def changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a method that gets noise with changed fields and calls the original with it."""

    def method(original: Any, *arguments: Any) -> Any:
        def other(value: Any) -> Any:
            if not isinstance(value, Noise):
                return value
            return replace(value, **{name: change(getattr(value, name)) for name, change in changes.items()})

        return original(*map(other, arguments))

    return method


def squared(original: Any, noise: Noise, utilities: Tensor) -> Tensor:
    """Sum with utilities that enter twice."""
    total: Tensor = original(noise, utilities * utilities.abs())
    return total


def node_utilities(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a node gradient with changed utilities."""
    return lambda original, op, weight, noise, utilities, x: original(op, weight, noise, change(utilities), x)


def reseeded(original: Any, *arguments: Any) -> Tensor:
    """Seed the global generator in the forward."""
    torch.manual_seed(3)
    total: Tensor = original(*arguments)
    return total


def squared_flips(_: Any, noise: FlippedNoise, utilities: Tensor) -> Tensor:
    """Square the fitness in the two-sided flip update, as NESgpu's Synthetic does."""
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


def lost_duplicates(_: Any, noise: SparseNoise, utilities: Tensor) -> Tensor:
    """Overwrite columns that several members share instead of summing them."""
    _, groups, _, *rest = noise.values.shape
    weighted = (noise.values * append_axes(utilities, noise.values)).flatten(0, 2)
    total: Tensor = weighted.new_zeros(groups * noise.inputs, *rest)
    total[noise.columns.flatten()] = weighted
    return total.unflatten(0, (groups, noise.inputs)).transpose(1, 2)


def with_replacement(original: Any, weight: Tensor, stream: NoiseStream) -> SparseNoise:
    """Draw columns of a member that may be the same one."""
    noise: SparseNoise = original(weight, stream)
    columns = stream.integers("columns", weight.shape[2], weight.shape[0], noise.columns.shape[2])
    return replace(noise, columns=columns)


def weaker(original: Any, weight: Tensor, stream: NoiseStream) -> SparseNoise:
    """Draw sparse values without sqrt(i / k)."""
    noise: SparseNoise = original(weight, stream)
    return replace(noise, values=noise.values * (noise.columns.shape[2] / noise.inputs) ** 0.5)


def equal_members(_: Any, weight: Tensor, stream: NoiseStream) -> DenseNoise:
    """Share one draw between all members, however the population is split."""
    shared = stream.shared().normal("dense", *weight.shape)[0]
    return DenseNoise(shared.expand(len(stream.members), *weight.shape).clone())


def global_noise(_: Any, weight: Tensor, stream: NoiseStream) -> DenseNoise:
    """Draw noise from the global generator."""
    return DenseNoise(torch.randn(len(stream.members), *weight.shape, dtype=weight.dtype))


def regenerated_globally(original: Any, noise: StreamNoise) -> Tensor:
    """Draw noise from the global generator wherever it is read."""
    values: Tensor = original(noise)
    return values if values.is_meta else torch.randn_like(values)


reads = list[object]()


def other_factors(original: Any, noise: RedrawnFactors) -> Iterator[Any]:
    """Draw other factors at every reading."""
    for members, factors in original(noise):
        reads.append(members)
        yield members, Factors(factors.down, factors.up.roll(len(reads), -1))


def at_start(members: range) -> range:
    """Count members of a part from its own start."""
    return range(len(members))


def rolled(values: Tensor) -> Tensor:
    """Give each member what its neighbour has."""
    return values.roll(1, 0)


def narrowed(values: Tensor) -> Tensor:
    """Lose the low bits, as a cast to float32 and back does."""
    return values.float().double()


def without(_: object) -> None:
    """Drop a field."""


Flips, Outputs = Flipped("both"), DropoutMask(0.3, "out")

BUGS: dict[str, tuple[AnyScheme, str]] = {
    "nothing is returned": (planted(Flipped(), forward=lambda *_: None), "forward returned NoneType"),
    "output of another dtype": (
        planted(Flipped(), forward=lambda original, *given: original(*given).float()),
        "float32, expected torch.float64",
    ),
    "signs of outputs are not applied": (planted(Flips, correction=changed(outputs=without)), "forward"),
    "unperturbed output": (
        planted(Flipped(), correction=lambda original, *given: torch.zeros_like(original(*given))),
        "forward",
    ),
    "seeded global generator": (planted(Flipped(), correction=reseeded), "forward advanced torch's global"),
    "squared fitness of flips": (planted(Flips, weighted_sum=squared_flips), "update of weight"),
    "picks in another order": (
        planted(Permuted("both"), weighted_sum=changed(outputs=lambda picks: picks.flip(-1))),
        "update of weight",
    ),
    "lost duplicates": (planted(SparsePerturbed(1), weighted_sum=lost_duplicates), "update of weight"),
    "columns with replacement": (planted(SparsePerturbed(4), sample=with_replacement), "forward|update"),
    "weaker values": (planted(SparsePerturbed(2), sample=weaker), "variance"),
    "weaker signs": (planted(SparsePerturbed(2, "sign"), sample=weaker), "variance"),
    "squared sparse utilities": (
        planted(SparsePerturbed(2, "sign"), weighted_sum=squared),
        "update of weight",
    ),
    "noise of the first step": (
        planted(Perturbed(), sample=lambda original, w, stream: original(w, replace(stream, step=0))),
        "between steps",
    ),
    "noise depends on the split": (
        planted(
            Perturbed(),
            sample=lambda original, w, stream: original(w, replace(stream, members=at_start(stream.members))),
        ),
        "split",
    ),
    "equal members": (planted(Perturbed(), sample=equal_members), "two members have the same noise"),
    "global noise": (planted(Perturbed(), sample=global_noise), "off|global|different noise"),
    "other noise in the update": (
        planted(Perturbed(), weighted_sum=changed(values=rolled)),
        "update of weight",
    ),
    "low bits lost in the forward": (
        planted(Perturbed(), forward=changed(values=narrowed)),
        "forward is off",
    ),
    "low bits lost in the update": (
        planted(Perturbed(), weighted_sum=changed(values=narrowed)),
        "update of weight is off",
    ),
    "another draw in the update": (
        planted(
            Regenerated(), weighted_sum=changed(stream=lambda stream: replace(stream, step=stream.step + 1))
        ),
        "update of weight",
    ),
    "a piece draws by its position": (
        planted(
            Regenerated(),
            forward=changed(stream=lambda stream: replace(stream, members=at_start(stream.members))),
        ),
        "in parts",
    ),
    "regenerated globally": (
        planted(Regenerated(), dense_noise=regenerated_globally),
        "off|global|different",
    ),
    "squared factors": (planted(LowRank(1), weighted_sum=squared), "update of weight"),
    "factors of neighbours": (planted(LowRank(1), weighted_sum=changed(up=rolled)), "update of weight"),
    "factors of other ranks": (planted(LowRank(2), forward=changed(up=lambda up: up.flip(2))), "forward"),
    "stronger factors": (
        planted(
            LowRank(2),
            factors=lambda original, *given: replace(drawn := original(*given), up=drawn.up * math.sqrt(2)),
        ),
        "variance",
    ),
    "other factors at every reading": (
        planted(LowRank(1, regenerated=True), _pieces=other_factors),
        "forward|different noise",
    ),
    "gates of neighbours": (planted(Outputs, node_gradient=changed(kept=rolled)), "update of weight"),
    "node gradient without 1 / v": (
        planted(Outputs, node_gradient=node_utilities(lambda c: c * variance(0.3))),
        "update of weight",
    ),
    "squared node gradient": (
        planted(Outputs, node_gradient=node_utilities(lambda c: c * c.abs())),
        "update of weight",
    ),
    "equal antithetic halves": (
        planted(
            Outputs, node_gradient=node_utilities(lambda c: torch.cat([c[: len(c) // 2], -c[len(c) // 2 :]]))
        ),
        "update of weight",
    ),
    "another standard deviation": (
        planted(DropoutMask(), noise_std=lambda _, weight, sigma: torch.ones_like(weight)),  # noqa: ARG005  its signature
        "variance",
    ),
    "no standard deviation": (
        planted(DropoutMask(), noise_std=lambda _, weight, sigma: torch.zeros_like(weight)),  # noqa: ARG005  its signature
        "varies",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """A scheme with a known mistake is refused, and the message says what is wrong."""
    scheme, words = BUGS[name]
    error = TypeError if "NoneType" in words else WrongResultError
    for stream in STREAMS if isinstance(scheme, Regenerated) else (None,):
        torch.manual_seed(0)
        with torch.random.fork_rng(), pytest.raises(error, match=words):
            check_linear(scheme, stream)


def test_the_schemes_pass_without_the_bugs() -> None:
    """It is the bugs that fail the check."""
    schemes: list[AnyScheme] = [
        *(Flips, FlippedSign(), SparsePerturbed(1), Perturbed(), Permuted("both")),
        *(Regenerated(), LowRank(2), Outputs),
    ]
    for scheme in schemes:
        check_linear(scheme)


def shifted(members: range) -> range:
    """Count cores from another member."""
    return range(members.start + 1, members.stop + 1)


def wrong_stride(original: Any, noise: Noise, utilities: Tensor) -> Tensor:
    """Count places of a row by the number of outputs instead of inputs."""
    total: Tensor = original(noise, utilities)
    return total.transpose(1, 2).reshape(total.shape)


def natural_order(order: Tensor) -> Tensor:
    """Return the order of columns in which the matrix is not permuted."""
    return torch.arange(order.shape[2]).expand_as(order)


CORE_BUGS: dict[str, AnyScheme] = {
    "squared fitness": planted(Flipped("both", cores=2), weighted_sum=squared_flips),
    "one side is summed": planted(FlippedSign(), weighted_sum=changed(outputs=without)),
    "cores of other members, both sides": planted(
        Flipped("both", cores=2), weighted_sum=changed(members=shifted)
    ),
    "cores of other members, one side": planted(
        Flipped("in", cores=3), weighted_sum=changed(members=shifted)
    ),
    "picks of another core": planted(Permuted(cores=2), weighted_sum=changed(core=rolled)),
    "wrong stride": planted(Permuted("both"), weighted_sum=wrong_stride),
    "wrong stride, two cores": planted(Permuted("both", cores=2), weighted_sum=wrong_stride),
    "rows left in place": planted(
        Permuted("out"), weighted_sum=changed(outputs=lambda picks: picks.flip(-1))
    ),
    "taps forgotten": planted(
        Hadamard(), weighted_sum=changed(taps=lambda taps: None if taps is None else torch.ones_like(taps))
    ),
    "another order of columns": planted(Hadamard(cores=2), weighted_sum=changed(order=natural_order)),
}


@pytest.mark.parametrize("name", CORE_BUGS)
def test_a_wrong_update_of_cores_is_found(name: str) -> None:
    """Cores, signs or places mixed up between forward and update, with one core and several."""
    with pytest.raises(WrongResultError, match="update of weight"):
        check_sums(CORE_BUGS[name])


def test_cores_counted_from_a_parts_own_start_are_found() -> None:
    """The check of splits finds it where the number of cores does not divide a block."""
    scheme = planted(Flipped("in", cores=3), correction=changed(members=at_start))
    with pytest.raises(WrongResultError, match="forward in parts"):
        check_split(Setting(scheme, filled(nn.Linear(5, 4)), (5,)))


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
