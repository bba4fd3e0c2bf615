"""Bugs planted in schemes, many of them found in other implementations: the correctness checks find each."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esbench.workload import WrongResultError
from impls.perturbation import function_mode
from impls.perturbation.noise import STREAMS, Noise, NoiseStream
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
from impls.schemes.lowrank import Factors, RedrawnFactors
from impls.schemes.regenerated import StreamNoise
from impls.verify.checks import Setting, check
from tests.schemes.cases import check_sums, filled


def run_checks(scheme: AnyScheme, stream: str | None = None) -> None:
    """Run the correctness checks on a Linear layer, then forward and update on a grouped convolution too."""
    check(Setting(scheme, filled(nn.Linear(6, 5)), (6,), stream=stream))
    check_sums(scheme)


def planted(scheme: AnyScheme, **methods: Callable[..., Any]) -> AnyScheme:
    """Return the scheme with replaced methods; each gets the original method as its first argument."""
    kind = type(scheme)

    def replaced(name: str) -> Callable[..., Any]:
        def wrong(self: object, *arguments: Any) -> Any:
            return methods[name](partial(getattr(kind, name), self), *arguments)

        return wrong

    made: AnyScheme = type(kind.__name__, (kind,), {name: replaced(name) for name in methods})(**vars(scheme))
    return made


def changed(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a method that calls the original with changed fields of the noise."""

    def method(original: Any, *arguments: Any) -> Any:
        return original(
            *(
                replace(value, **{name: change(getattr(value, name)) for name, change in changes.items()})
                if isinstance(value, Noise)
                else value
                for value in arguments
            )
        )

    return method


def rolled(values: Tensor) -> Tensor:
    """Give each member the noise of its neighbor."""
    return values.roll(1, 0)


def narrowed(values: Tensor) -> Tensor:
    """Lose the low bits, as a cast to float32 and back does."""
    return values.float().double()


def without(_: object) -> None:
    """Drop a field."""


def from_start(members: range) -> range:
    """Count the members of a part from the start of the part."""
    return range(len(members))


def scaled(field: str, factor: float) -> Callable[..., Any]:
    """Return a method whose noise has a field of another size."""

    def method(original: Any, *arguments: Any) -> Any:
        noise = original(*arguments)
        return replace(noise, **{field: getattr(noise, field) * factor})

    return method


def squared(original: Any, noise: Noise, utilities: Tensor) -> Tensor:
    """Sum with utilities that enter twice, as NESgpu's Synthetic does."""
    total: Tensor = original(noise, utilities * utilities.abs())
    return total


def node_utilities(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return a node gradient with changed utilities."""
    return lambda original, op, weight, noise, utilities, x: original(op, weight, noise, change(utilities), x)


def with_stream(change: Callable[[NoiseStream], NoiseStream]) -> Callable[..., Any]:
    """Return a method ``sample`` that draws from a changed stream."""
    return lambda original, weight, stream: original(weight, change(stream))


def reseeded(original: Any, *arguments: Any) -> Tensor:
    """Seed the global generator in the forward."""
    torch.manual_seed(3)
    total: Tensor = original(*arguments)
    return total


def weight_left_changed(original: Any, op: object, weight: Tensor, *arguments: Any) -> Tensor:
    """Leave the model's weight larger after the forward."""
    y: Tensor = original(op, weight, *arguments)
    weight.mul_(2)
    return y


def equal_members(_: Any, weight: Tensor, stream: NoiseStream) -> DenseNoise:
    """Share one draw between all members, however the population is split."""
    shared = stream.shared().normal("dense", *weight.shape)[0]
    return DenseNoise(shared.expand(len(stream.members), *weight.shape).clone())


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


Flips, Outputs, UPDATE = Flipped("both"), DropoutMask(0.3, "out"), "update of weight"

BUGS: dict[str, tuple[AnyScheme, str]] = {
    "nothing is returned": (planted(Flipped(), forward=lambda *_: None), "forward returned NoneType"),
    "another dtype": (
        planted(Flipped(), forward=lambda original, *arguments: original(*arguments).float()),
        "float32, expected torch.float64",
    ),
    "unperturbed output": (
        planted(Flipped(), correction=lambda original, *arguments: torch.zeros_like(original(*arguments))),
        "forward",
    ),
    "seeded global generator": (planted(Flipped(), correction=reseeded), "forward advanced torch's global"),
    "signs of outputs are not summed": (
        planted(FlippedSign(), weighted_sum=changed(outputs=without)),
        UPDATE,
    ),
    "squared utilities": (planted(Flips, weighted_sum=squared), UPDATE),
    **{
        f"{field} of neighbors": (planted(scheme, weighted_sum=changed(**{field: rolled})), UPDATE)
        for scheme, field in ((Perturbed(), "values"), (Permuted(cores=2), "core"))
    },
    "weaker values": (planted(SparsePerturbed(2), sample=scaled("values", 0.6)), "variance"),
    "taps are forgotten": (
        planted(
            Hadamard(),
            weighted_sum=changed(taps=lambda taps: None if taps is None else torch.ones_like(taps)),
        ),
        UPDATE,
    ),
    "noise of the first step": (
        planted(Perturbed(), sample=with_stream(lambda stream: replace(stream, step=0))),
        "between steps",
    ),
    "noise of the first seed": (
        planted(Perturbed(), sample=with_stream(lambda stream: replace(stream, seed=0))),
        "between seeds",
    ),
    "weight left changed": (planted(Flipped(), forward=weight_left_changed), "forward changed weight"),
    **{
        f"cores counted from the start of a part in the {phase}": (
            planted(Flipped("in", cores=3), **{method: changed(members=from_start)}),
            f"{phase}.* in parts",
        )
        for phase, method in (("forward", "correction"), ("update", "weighted_sum"))
    },
    "noise depends on the split": (
        planted(
            Perturbed(),
            sample=with_stream(lambda stream: replace(stream, members=from_start(stream.members))),
        ),
        "split",
    ),
    "equal members": (planted(Perturbed(), sample=equal_members), "two members have the same noise"),
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
        UPDATE,
    ),
    "a piece draws by its position": (
        planted(
            Regenerated(),
            forward=changed(stream=lambda stream: replace(stream, members=from_start(stream.members))),
        ),
        "in parts",
    ),
    "noise from the global generator": (
        planted(Regenerated(), dense_noise=regenerated_globally),
        "off|global|different",
    ),
    "factors of other ranks": (planted(LowRank(2), forward=changed(up=lambda up: up.flip(2))), "forward"),
    "other factors at every reading": (
        planted(LowRank(1, regenerated=True), _pieces=other_factors),
        "forward|different noise",
    ),
    "gates of neighbors": (planted(Outputs, node_gradient=changed(kept=rolled)), UPDATE),
    "node gradient without 1 / v": (
        planted(Outputs, node_gradient=node_utilities(lambda c: c * 0.3 / 0.7)),
        UPDATE,
    ),
    "squared node gradient": (
        planted(Outputs, node_gradient=node_utilities(lambda c: c * c.abs())),
        UPDATE,
    ),
    "equal antithetic halves": (
        planted(
            Outputs, node_gradient=node_utilities(lambda c: torch.cat([c[: len(c) // 2], -c[len(c) // 2 :]]))
        ),
        UPDATE,
    ),
    "another standard deviation": (
        planted(DropoutMask(), noise_std=lambda _, weight, sigma: torch.ones_like(weight)),  # noqa: ARG005  its signature
        "variance",
    ),
    "no standard deviation": (
        planted(DropoutMask(), noise_std=lambda _, weight, sigma: torch.zeros_like(weight)),  # noqa: ARG005  its signature
        "is not 0 where",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    """The checks fail on a scheme with a known mistake, and the message says what is wrong."""
    scheme, words = BUGS[name]
    error = TypeError if "NoneType" in words else WrongResultError
    for stream in STREAMS if isinstance(scheme, Regenerated) else (None,):
        torch.manual_seed(0)
        with torch.random.fork_rng(), pytest.raises(error, match=words):
            run_checks(scheme, stream)


@pytest.mark.parametrize(
    "scheme",
    [Flips, FlippedSign(), SparsePerturbed(1), Perturbed(), Regenerated(), LowRank(2), Outputs],
    ids=str,
)
def test_schemes_without_the_bugs_pass(scheme: AnyScheme) -> None:
    """The same checks pass on the original schemes."""
    run_checks(scheme)


# Bugs outside of schemes.


def test_a_lost_stride_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that forgets its stride gives outputs of another shape."""

    def without_stride(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, *rest: Any) -> Any:  # noqa: ARG001  torch's signature
        return function_mode.LayerArguments(Conv2d(1, *rest), x, bias)

    handlers: dict[Any, Any] = {**function_mode.HANDLERS, nn.functional.conv2d: (1, without_stride)}
    monkeypatch.setattr(function_mode, "HANDLERS", handlers)
    with pytest.raises(WrongResultError, match="shape"):
        check(Setting(Perturbed(), filled(nn.Conv2d(2, 3, 2, stride=2)), (2, 5, 5)))
