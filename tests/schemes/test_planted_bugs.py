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
from impls.perturbation.member_ops import append_axes
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
from impls.schemes.lowrank import Factors, RedrawnFactors
from impls.schemes.regenerated import StreamNoise
from impls.schemes.sparse import SparseNoise
from impls.verify.checks import Setting, check, check_split
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
    """Give each member the noise of its neighbour."""
    return values.roll(1, 0)


def narrowed(values: Tensor) -> Tensor:
    """Lose the low bits, as a cast to float32 and back does."""
    return values.float().double()


def reversed_picks(values: Tensor) -> Tensor:
    """Reverse the order of each member's indices."""
    return values.flip(-1)


def without(_: object) -> None:
    """Drop a field."""


def from_start(members: range) -> range:
    """Count the members of a part from the start of the part."""
    return range(len(members))


def shifted(members: range) -> range:
    """Count cores from another member."""
    return range(members.start + 1, members.stop + 1)


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


def wrong_stride(original: Any, noise: Noise, utilities: Tensor) -> Tensor:
    """Count places of a row by the number of outputs instead of inputs."""
    total: Tensor = original(noise, utilities)
    return total.transpose(1, 2).reshape(total.shape)


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


def lost_duplicates(_: Any, noise: SparseNoise, utilities: Tensor) -> Tensor:
    """Overwrite columns that several members share instead of summing them."""
    _, groups, _, *rest = noise.values.shape
    weighted = (noise.values * append_axes(utilities, noise.values)).flatten(0, 2)
    total: Tensor = weighted.new_zeros(groups * noise.inputs, *rest)
    total[noise.columns.flatten()] = weighted
    return total.unflatten(0, (groups, noise.inputs)).transpose(1, 2)


def with_replacement(original: Any, weight: Tensor, stream: NoiseStream) -> SparseNoise:
    """Draw columns of a member that may be equal."""
    noise: SparseNoise = original(weight, stream)
    columns = stream.integers("columns", weight.shape[2], weight.shape[0], noise.columns.shape[2])
    return replace(noise, columns=columns)


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
    "signs of outputs are not applied": (planted(Flips, correction=changed(outputs=without)), "forward"),
    "signs of outputs are not summed": (
        planted(FlippedSign(), weighted_sum=changed(outputs=without)),
        UPDATE,
    ),
    **{
        f"squared utilities of {scheme}": (planted(scheme, weighted_sum=squared), UPDATE)
        for scheme in (Flips, Flipped("both", cores=2), SparsePerturbed(2, "sign"), LowRank(1))
    },
    **{
        f"{field} of neighbours": (planted(scheme, weighted_sum=changed(**{field: rolled})), UPDATE)
        for scheme, field in ((Perturbed(), "values"), (LowRank(1), "up"), (Permuted(cores=2), "core"))
    },
    **{
        f"members of other cores in {scheme}": (
            planted(scheme, weighted_sum=changed(members=shifted)),
            UPDATE,
        )
        for scheme in (Flipped("both", cores=2), Flipped("in", cores=3))
    },
    **{
        f"wrong stride of {scheme}": (planted(scheme, weighted_sum=wrong_stride), UPDATE)
        for scheme in (Permuted("both"), Permuted("both", cores=2))
    },
    **{
        f"reversed picks of {scheme}": (planted(scheme, weighted_sum=changed(outputs=reversed_picks)), UPDATE)
        for scheme in (Permuted("both"), Permuted("out"))
    },
    **{
        f"weaker values of {scheme}": (planted(scheme, sample=scaled("values", 0.6)), "variance")
        for scheme in (SparsePerturbed(2), SparsePerturbed(2, "sign"))
    },
    "lost duplicates": (planted(SparsePerturbed(1), weighted_sum=lost_duplicates), UPDATE),
    "columns with replacement": (planted(SparsePerturbed(4), sample=with_replacement), "forward|update"),
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
    "stronger factors": (planted(LowRank(2), factors=scaled("up", 2**0.5)), "variance"),
    "other factors at every reading": (
        planted(LowRank(1, regenerated=True), _pieces=other_factors),
        "forward|different noise",
    ),
    "gates of neighbours": (planted(Outputs, node_gradient=changed(kept=rolled)), UPDATE),
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
        "varies",
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


def test_cores_counted_from_the_start_of_a_part_are_found() -> None:
    """The check of splits finds cores counted from the start of each part."""
    scheme = planted(Flipped("in", cores=3), correction=changed(members=from_start))
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
        run_checks(Perturbed())
