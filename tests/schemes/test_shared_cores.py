"""Shared cores (permuted, flipped, Hadamard): structure, members' cores, closed forms, the transform."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impls.perturbation import noise as streams
from impls.perturbation.member_ops import (
    apply_cores,
    group_by_core,
    member_cores,
    same_core_fraction,
    take_channels,
)
from impls.perturbation.operators import AbstractOperator, Convolution, Linear
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Flipped, FlippedSign, Hadamard, Permuted, hadamard
from impls.verify.checks import Setting, check_split
from tests.scheme_cases import check_sums, closed_form, fill, normal

OPERATORS = [(Linear(), (1, 3, 4), (4,)), (Convolution(padding=1, groups=2), (2, 3, 2, 3, 3), (2, 5, 4))]


@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 600),
    total=st.integers(1, 12),
    count=st.integers(1, 7),
    repeats=st.integers(1, 2),
    case=st.sampled_from(OPERATORS),
)
def test_member_j_has_core_j_modulo_the_number_of_cores(
    start: int,
    total: int,
    count: int,
    repeats: int,
    case: tuple[AbstractOperator, tuple[int, ...], tuple[int, ...]],
) -> None:
    """Products, dense noise and sums agree on each member's core, in any part of a population."""
    op, shape, features = case
    cores = normal(count, *shape, seed=start)
    x = normal(repeats, total, shape[0], *features, seed=start + 1)
    members = range(start, start + total)
    separate = [op.apply_shared(x[:, j : j + 1], cores[m % count]) for j, m in enumerate(members)]
    torch.testing.assert_close(apply_cores(op, x, cores, members), torch.cat(separate, dim=1))
    assert torch.equal(member_cores(cores, members), torch.stack([cores[m % count] for m in members]))
    grouped = group_by_core(torch.arange(1, total + 1), count, members)
    for core in range(count):
        expected = [j + 1 for j in range(total) if (start + j) % count == core]
        assert grouped[core][grouped[core] > 0].tolist() == expected


@given(members=st.integers(2, 40), cores=st.integers(1, 50))
def test_the_fraction_of_pairs_with_the_same_core(members: int, cores: int) -> None:
    """The fraction equals a count over all pairs of members."""
    same = sum(a % cores == b % cores for a, b in itertools.permutations(range(members), 2))
    assert same_core_fraction(members, cores) == pytest.approx(same / (members * (members - 1)))


def test_channels_are_selected_by_each_members_index() -> None:
    """Selecting channels equals indexing row by row, with and without space."""
    for space in ((), (1, 1), (2, 3)):
        x, index = normal(2, 3, 2, 4, *space), torch.randint(4, (3, 2, 5))
        selected = take_channels(x, index)
        for r, m, g in itertools.product(range(2), range(3), range(2)):
            assert torch.equal(selected[r, m, g], x[r, m, g, index[m, g]])


@pytest.mark.parametrize(
    "scheme",
    [
        Flipped("in", cores=3),
        FlippedSign(cores=3),
        Permuted(in_sparsity=0.5, cores=3),
        Permuted("out", out_sparsity=0.5, cores=3),
        Permuted("both", cores=3),
    ],
    ids=str,
)
def test_several_cores_agree_with_the_reference(scheme: AnyScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cores divide neither seven members nor a block; two members use a part of them.

    A compiler's update of both permuted sides, which is also a GPU's, agrees with the reference, too.
    """
    for members in (70, 7, 2):
        check_sums(scheme, members)
    check_split(Setting(scheme, fill(nn.Linear(5, 4)), (5,)))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    check_sums(scheme, 7)


def test_permuted_sides_are_summed_in_pieces_for_groups_and_sparse_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update of both sides is the sum of dense noise, also in pieces, of groups and of few channels."""
    scheme = Permuted("both", in_sparsity=0.5, out_sparsity=0.6, cores=3)
    population = perturb(fill(nn.Conv2d(8, 10, 3, groups=2)), scheme, members=9, sigma=1.0, warn=False)
    noise = population.sample(0)
    utilities = torch.linspace(-1, 2, 9, dtype=torch.float64)
    expected = torch.tensordot(utilities, population.dense_noise(noise)["weight"], dims=1)
    for size in (2**10, 2**22):
        monkeypatch.setitem(streams.PIECE_BYTES, "cpu", size)
        total = scheme.weighted_sum(noise.layers[""].weight, utilities)  # type: ignore[arg-type]  # of this scheme
        torch.testing.assert_close(total.flatten(0, 1), expected)


def test_closed_forms_of_kappa() -> None:
    """The closed forms have the documented values, also for populations and widths too large to sample."""
    for shape, taps in (((16, 24), 1), ((12, 10, 3, 3), 9)):
        for side, length in (("in", shape[0]), ("out", shape[1]), ("both", 1)):
            assert closed_form(Flipped(side), shape, 64) == length * taps + 1  # type: ignore[arg-type]  # a side
            assert closed_form(FlippedSign(side), shape, 64) == length * taps - 1  # type: ignore[arg-type]  # a side
    assert closed_form(Flipped("in", cores=32), (64, 64), 2**20) == pytest.approx(65 / 32, rel=1e-3)
    assert closed_form(Flipped("in", cores=64), (64, 64), 64) == 0
    assert closed_form(Permuted(), (1000, 500), 64) == pytest.approx(1000 / 500, rel=0.01)
    # Centering does not remove the differences between cores: two cores help little at k = i.
    for sparsity, share in ((1.0, 0.75), (0.05, 0.5 + 0.25 * 0.05)):
        alone, pair = (
            closed_form(Permuted(in_sparsity=sparsity, cores=cores), (2000, 1000), 10**6) for cores in (1, 2)
        )
        assert pair / alone == pytest.approx(share, rel=0.01)


PERMUTED: list[dict[str, Any]] = [
    {"in_sparsity": 0.5},
    {"side": "out", "out_sparsity": 0.4},
    {"side": "both", "in_sparsity": 0.5},
    {"side": "both", "in_sparsity": 0.5, "out_sparsity": 0.5},
]


def draw_dense(scheme: AnyScheme, module: nn.Module, members: int = 6) -> Tensor:
    """Return the dense noise of a layer's weight."""
    population = perturb(module, scheme, members=members, sigma=1.0, warn=False)
    return population.dense_noise(population.sample(0))["weight"]


@pytest.mark.parametrize("options", PERMUTED, ids=str)
def test_a_member_is_the_core_with_permuted_channels(options: dict[str, Any]) -> None:
    """Members have the core's entries in other channels; a sparsity is a share of channels, rounded down."""
    scheme = Permuted(**options)
    noise = draw_dense(scheme, nn.Linear(7, 11, bias=False))
    assert torch.equal(noise.flatten(1).sort().values, noise[:1].flatten(1).sort().values.expand(6, 77))
    assert noise.any(2).sum(1).eq(int(11 * scheme.out_sparsity)).all()
    assert noise.any(1).sum(1).eq(int(7 * scheme.in_sparsity)).all()
    # A permutation of an axis leaves the sums over it as they are.
    for axis, is_permuted in ((1, scheme.side != "out"), (2, scheme.side != "in")):
        sums = noise.abs().sum(axis)
        assert is_permuted != torch.allclose(sums[0], sums[1])
    check_sums(scheme, members=3)


def test_permuting_both_sides_gives_all_entries_the_same_variance() -> None:
    """The mean square of each entry over many members is that of all entries, up to its standard error."""
    scheme = Permuted("both", in_sparsity=0.5, out_sparsity=0.5)
    squares = draw_dense(scheme, nn.Linear(4, 2, bias=False), members=4000).square()
    error = squares.std(0) / 4000**0.5
    assert (squares.mean(0) - squares.mean()).abs().le(5 * error).all()


@pytest.mark.parametrize(("side", "shape"), [("in", (4, 1)), ("out", (1, 4)), ("both", (1, 1))])
def test_a_single_channel_cannot_be_permuted(side: Any, shape: tuple[int, int]) -> None:
    """If a single channel is permuted, members are equal and there is no kappa."""
    noise = draw_dense(Permuted(side), nn.Linear(shape[1], shape[0], bias=False))
    assert torch.equal(noise, noise[:1].expand_as(noise))
    assert Permuted(side).kappa(torch.empty(1, *shape), 6) is None


def test_entries_of_signs_are_signs() -> None:
    """Cores of signs and Hadamard noise have entries +1 and -1 only."""
    for scheme in (FlippedSign("in", cores=2), FlippedSign("out"), FlippedSign(), Hadamard()):
        assert draw_dense(scheme, nn.Conv2d(4, 6, 3)).abs().eq(1).all()


def check_transform(outputs: int, inputs: int, space: int) -> None:
    """Compare the transform with a product; entry (i, j) is +1 where i & j has an even number of bits."""
    parity = torch.arange(outputs).unsqueeze(1) & torch.arange(inputs)
    for shift in (8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    matrix, x = (1 - 2 * (parity & 1)).double(), normal(2, inputs, space)
    largest = max(hadamard.hadamard_factors(hadamard.hadamard_width(outputs, inputs)))
    factor = hadamard.sylvester(largest, device=torch.device("cpu"), dtype=torch.float64)
    torch.testing.assert_close(hadamard.walsh_hadamard_transform(x, outputs, factor), matrix @ x)
    assert torch.equal(hadamard.hadamard_matrix(outputs, inputs, factor), matrix)


@settings(max_examples=60, deadline=None)
@given(outputs=st.integers(1, 200), inputs=st.integers(1, 200), space=st.integers(1, 3))
def test_the_transform_is_a_product_with_sylvesters_matrix(outputs: int, inputs: int, space: int) -> None:
    """The transform equals the product for any width, with and without positions."""
    check_transform(outputs, inputs, space)


def test_wide_transforms_have_several_factors() -> None:
    """Wide transforms are right, also with few outputs or inputs; factors multiply to the width."""
    for outputs, inputs in ((4096, 3), (3, 4096), (5000, 1), (1100, 1030), (1, 8192)):
        for space in (1, 2):
            check_transform(outputs, inputs, space)
    for bits in range(21):
        for largest in (hadamard.FACTOR, hadamard.IMAGE_FACTOR):
            factors = hadamard.hadamard_factors(2**bits, largest)
            assert torch.tensor(factors).prod() == 2**bits
            assert factors == sorted(factors, reverse=True)
            assert factors[0] <= min(largest, 2 * factors[-1], hadamard.hadamard_factors(2**bits)[0])
