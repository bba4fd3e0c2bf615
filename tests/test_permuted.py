"""Permuted noise: both sides, sparsity on either, picks with replacement, and its closed forms."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import WrongResultError
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Permuted
from impls.schemes.permuted import PermutedNoise
from tests.shared_core_cases import GROUPED, LINEAR, agrees, check_sums, closed

OPTIONS: list[dict[str, Any]] = [
    {},
    {"in_sparsity": 0.5},
    {"side": "out"},
    {"side": "out", "out_sparsity": 0.4},
    {"side": "both"},
    {"side": "both", "in_sparsity": 0.5},
    {"side": "both", "in_sparsity": 0.5, "out_sparsity": 0.5},
]


def written(scheme: Permuted, outputs: int, inputs: int, members: int = 6) -> Tensor:
    """Write out the members of a Linear layer, [m, o, i]."""
    population = perturb(nn.Linear(inputs, outputs, bias=False), scheme, members=members, sigma=1.0)
    return population.dense_noise(population.sample(0))["weight"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_closed_form_of_kappa_is_what_members_have(options: dict[str, Any]) -> None:
    """Each side and sparsity with several cores in groups; test_quality_fit.py has all variants."""
    for replaced in (False, True):
        agrees(Permuted(**options, cores=3, replace=replaced), GROUPED)
    agrees(Permuted(**options, replace=True), LINEAR)


def test_closed_forms_in_figures() -> None:
    """To leading order o taps / k for inputs and i taps / k for outputs; (3 taps + 4) / (o i) for both."""
    wide = (1000, 500)
    assert closed(Permuted(), wide, 64) == pytest.approx(1000 / 500, rel=0.01)
    assert closed(Permuted(in_sparsity=0.1), wide, 64) == pytest.approx(1000 / 50, rel=0.01)
    assert closed(Permuted("out", out_sparsity=100), wide, 64) == pytest.approx(500 / 100, rel=0.02)
    assert closed(Permuted(), (*wide, 3, 3), 64) == pytest.approx(9 * 1000 / 500, rel=0.01)
    assert closed(Permuted("both"), (*wide, 3, 3), 64) == pytest.approx(31 / (1000 * 500), rel=0.01)


@pytest.mark.parametrize("replaced", [False, True], ids=["", "replace"])
@pytest.mark.parametrize("side", ["in", "out", "both"])
def test_the_closed_form_is_that_of_all_picks(side: Any, replaced: bool) -> None:
    """Every pick of a 3 x 3 layer, enumerated for many cores: only the mean over cores is estimated."""
    width, kept, cores = 3, 2, 8000
    ways_in = ways_out = [tuple(range(width))]
    if side != "out":
        ways_in = list(
            itertools.product(range(width), repeat=kept)
            if replaced
            else itertools.permutations(range(width), kept)
        )
    if side != "in":
        ways_out = list(
            itertools.product(range(width), repeat=width)
            if replaced
            else itertools.permutations(range(width))
        )
    core = torch.randn(cores, width, len(ways_in[0]), generator=torch.Generator().manual_seed(0))
    core[:, kept if side != "in" else width :] = 0
    noise = torch.stack(
        [
            core.new_zeros(cores, width, width).index_add_(2, torch.tensor(places), core[:, rows]).flatten(1)
            for rows, places in itertools.product(ways_out, ways_in)
        ],
        dim=1,
    )
    noise -= noise.mean(1, keepdim=True)
    second = noise.mT @ noise / noise.shape[1]
    squares, traces = second.square().sum((1, 2)), second.diagonal(dim1=1, dim2=2).sum(1)
    value = width**2 * float(squares.mean() / traces.mean() ** 2)
    error = value * float((squares / squares.mean() - 2 * traces / traces.mean()).std()) / cores**0.5
    options = {f"{one}_sparsity": kept for one in ("in", "out") if side in {one, "both"}}
    expected = closed(Permuted(side, **options, replace=replaced), (width, width), 10**6)
    assert error < 0.03 * value
    assert abs(value - 1 - expected) <= 4 * error, f"{value - 1:.3f} +- {error:.3f}, closed {expected:.3f}"


def test_centring_leaves_in_what_differs_between_cores() -> None:
    """Two cores give back little where all channels are kept, a half where few are."""
    for sparsity, share in ((1.0, 0.75), (0.05, 0.5 + 0.25 * 0.05)):
        one, two = (
            closed(Permuted(in_sparsity=sparsity, cores=cores), (2000, 1000), 10**6) for cores in (1, 2)
        )
        assert two / one == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize(("side", "shape"), [("in", (4, 1)), ("out", (1, 4)), ("both", (1, 1))])
def test_one_channel_cannot_be_shuffled(side: Any, shape: tuple[int, int]) -> None:
    """Members of one core are all the same, nothing is learned, and there is no kappa."""
    scheme = Permuted(side)
    noise = written(scheme, *shape)
    assert torch.equal(noise, noise[:1].expand_as(noise))
    assert scheme.kappa(torch.Size((1, *shape)), 6) is None


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_member_is_the_core_with_its_channels_moved(options: dict[str, Any]) -> None:
    """All members have the same entries; the sparsity's number of columns and rows is not zero."""
    scheme = Permuted(**options)
    noise = written(scheme, 10, 8)
    assert torch.equal(noise.flatten(1).sort().values, noise[:1].flatten(1).sort().values.expand(6, 80))
    rows, columns = round(10 * scheme.out_sparsity), round(8 * scheme.in_sparsity)
    assert noise.abs().sum(2).ne(0).sum(1).eq(rows).all()
    assert noise.abs().sum(1).ne(0).sum(1).eq(columns).all()
    for axis, moved in ((1, scheme.side != "out"), (2, scheme.side != "in")):
        sums = noise.abs().sum(axis)
        assert moved != torch.allclose(sums[0], sums[1])


def test_both_sides_give_every_pair_of_places_the_same_noise() -> None:
    """Over all permutations of a small core, each entry meets each place equally often: variance is even."""
    scheme = Permuted("both", in_sparsity=2, out_sparsity=1)
    population = perturb(nn.Linear(3, 2, bias=False), scheme, members=4000, sigma=1.0)
    noise = population.sample(0).layers[""].weight
    assert isinstance(noise, PermutedNoise)
    places = [
        [*rows, *columns]
        for rows in itertools.permutations(range(2))
        for columns in itertools.permutations(range(3), 2)
    ]
    picks = torch.tensor(places)
    every = replace(
        noise, outputs=picks[:, None, :2].clamp(max=1), inputs=picks[:, None, 2:], members=range(len(places))
    )
    second = scheme.dense_noise(every).square().mean(0)
    torch.testing.assert_close(second, second.mean().expand_as(second))
    drawn = scheme.dense_noise(noise).square().mean(0)
    error = 6 * scheme.dense_noise(noise).square().std(0) / math.sqrt(4000)
    assert (drawn - second).abs().le(error).all()


def test_picks_with_replacement_add_up() -> None:
    """An input picked by two columns of the core gets both; one that none picks is zero."""
    scheme = Permuted(in_sparsity=3, replace=True)
    population = perturb(nn.Linear(4, 2, bias=False), scheme, members=1, sigma=1.0)
    noise = population.sample(0).layers[""].weight
    assert isinstance(noise, PermutedNoise)
    chosen = replace(noise, inputs=torch.tensor([[[2, 2, 0]]]))
    core, dense = noise.core[0, 0], scheme.dense_noise(chosen)[0, 0]
    expected = torch.stack([core[:, 2], torch.zeros(2), core[:, 0] + core[:, 1], torch.zeros(2)], dim=1)
    torch.testing.assert_close(dense, expected)


def test_every_combination_is_exact() -> None:
    """Forward and update equal the reference, in groups and with antithetic halves."""
    for options in OPTIONS:
        for replaced in (False, True):
            check_sums(Permuted(**options, replace=replaced), members=3)


class WrongStride(Permuted):
    """The update of both sides counts places of a row by the number of outputs, not of inputs."""

    @override
    def _combine_both(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        total = super()._combine_both(noise, utilities)
        return total.transpose(1, 2).reshape(total.shape)


class RowsMovedBack(Permuted):
    """Rows are moved in the forward and left in place in the update."""

    @override
    def weighted_sum(self, noise: PermutedNoise, utilities: Tensor) -> Tensor:
        rows = torch.arange(noise.outputs.shape[2]) if noise.outputs is not None else None
        kept = None if rows is None or noise.outputs is None else rows.expand_as(noise.outputs)
        return super().weighted_sum(replace(noise, outputs=kept), utilities)


@pytest.mark.parametrize("scheme", [WrongStride("both"), WrongStride("both", cores=2), RowsMovedBack("out")])
def test_a_wrong_update_is_found(scheme: AnyScheme) -> None:
    """Both sides indexed with the wrong stride, and a side forgotten."""
    with pytest.raises(WrongResultError, match="update of weight"):
        check_sums(scheme)


def test_bad_options_are_refused() -> None:
    """The message says which option, and why."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"side": "left"}, "side must be"),
        ({"in_sparsity": 0.0}, "in_sparsity must be in"),
        ({"side": "out", "out_sparsity": 1.5}, "out_sparsity must be in"),
        ({"in_sparsity": True}, "in_sparsity must be in"),
        ({"in_sparsity": "0.5"}, "in_sparsity must be in .* got '0.5'"),
        ({"side": "out", "in_sparsity": 0.5}, "no effect with side='out'"),
        ({"out_sparsity": 3}, "no effect with side='in'"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            Permuted(**options)
    with pytest.raises(ValueError, match="in_sparsity = 9 is above the width"):
        written(Permuted(in_sparsity=9), 4, 8)
