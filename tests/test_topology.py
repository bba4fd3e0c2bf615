"""Which connections are dropped and grown, whatever the scores are."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from esbench.measure import memory
from impls.training import topology

SIZES = st.integers(1, 400)
SCORES = ("distinct", "tied", "zero", "huge", "nan in weights")


def drawn(kind: str, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, a gradient and a mask [size]; the weight is zero where nothing is connected."""
    generator = torch.Generator().manual_seed(seed)
    weight, gradient = torch.randn(2, size, generator=generator)
    if kind == "tied":
        weight, gradient = weight.sign(), gradient.sign()
    elif kind == "zero":
        weight, gradient = torch.zeros(2, size)
    elif kind == "huge":
        weight = weight * 1e38 * 10
    kept = int(torch.randint(size + 1, (), generator=generator))
    mask = topology.scattered(weight, kept, generator)
    weight = weight.masked_fill(~mask, 0)
    if kind == "nan in weights":
        weight[: size // 2] = math.nan
    return weight, gradient, mask


def moved(weight: Tensor, gradient: Tensor, mask: Tensor, count: int, *, narrowed: bool) -> Tensor:
    """Return the next mask, which must be one."""
    after, is_one = topology.by_selection(weight, gradient, mask, count, narrowed=narrowed)
    assert bool(is_one)
    return after


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCORES), SIZES, st.integers(0, 99), st.floats(0, 1), st.booleans())
def test_the_number_of_connections_is_exact(
    kind: str, size: int, seed: int, share: float, narrowed: bool
) -> None:
    """With ties, zeros, infinities and NaN as well; what was not dropped was connected."""
    weight, gradient, mask = drawn(kind, size, seed)
    kept = int(mask.sum())
    after = moved(weight, gradient, mask, int(share * kept), narrowed=narrowed)
    assert int(after.sum()) == kept
    assert int((mask & after).sum()) >= kept - int(share * kept)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 400), st.integers(0, 99), st.floats(0, 1), st.booleans())
def test_the_smallest_are_dropped_and_the_steepest_grown(
    size: int, seed: int, share: float, narrowed: bool
) -> None:
    """As lists sorted in Python say, and as two full sorts do: on distinct scores all three agree."""
    weight, gradient, mask = drawn("distinct", size, seed)
    count = int(share * int(mask.sum()))
    active = sorted(mask.nonzero().flatten().tolist(), key=lambda at: abs(float(weight[at])))
    stays = set(active[count:])
    rest = sorted(set(range(size)) - stays, key=lambda at: -abs(float(gradient[at])))
    expected = stays | set(rest[:count])
    after = moved(weight, gradient, mask, count, narrowed=narrowed)
    assert set(after.nonzero().flatten().tolist()) == expected
    assert torch.equal(topology.by_sorting(weight, gradient, mask, count), after)


def test_where_everything_is_connected_all_comes_back() -> None:
    """What is dropped is all that can be grown, also where its gradient is the least."""
    weight, gradient = torch.arange(8.0, 0, -1), torch.arange(7.0, -1, -1)
    mask = torch.ones(8, dtype=torch.bool)
    assert moved(weight, gradient, mask, 4, narrowed=True).all()
    assert topology.by_sorting(weight, gradient, mask, 4).all()


@pytest.mark.parametrize("shape", [(300, 300), (16, 16, 3, 3)])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.9])
def test_a_sample_changes_nothing_but_the_time(shape: tuple[int, ...], density: float) -> None:
    """Narrowed or not, the same connections move, and the mask has the weight's shape."""
    generator = torch.Generator().manual_seed(1)
    weight, gradient = torch.randn(2, *shape, generator=generator)
    mask = topology.scattered(weight, int(density * weight.numel()), generator)
    count = int(0.3 * int(mask.sum()))
    narrow, wide = (moved(weight, gradient, mask, count, narrowed=flag) for flag in (True, False))
    assert torch.equal(narrow, wide)
    assert narrow.shape == shape


@pytest.mark.parametrize("misled", ["too high", "too low", "all alike"])
def test_a_sample_that_misleads_costs_no_connection(misled: str) -> None:
    """Where the looked-at entries are larger or smaller than the others, or nothing tells them apart."""
    scores = 10 + torch.rand(2**17, generator=torch.Generator().manual_seed(0))
    seen = slice(None, None, (2**17 // topology.SAMPLE) | 1)
    if misled == "all alike":
        scores[:] = 1.0
    else:
        scores[seen] += 5 if misled == "too high" else -5
    weight, mask = torch.zeros(2**17), torch.zeros(2**17, dtype=torch.bool)
    mask[: 2**14] = True
    after = moved(weight, scores, mask, 2**14, narrowed=True)
    assert int(after.sum()) == 2**14
    assert scores[after].min() >= scores[~after].max()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("narrowed", [True, False])
def test_a_gradient_that_is_not_finite_moves_nothing(bad: float, narrowed: bool) -> None:
    """One such number is enough, and the caller is told."""
    weight, gradient, mask = drawn("distinct", 400, 3)
    gradient[7] = bad
    after, is_one = topology.by_selection(weight, gradient, mask, int(mask.sum()) // 2, narrowed=narrowed)
    assert torch.equal(after, mask)
    assert not bool(is_one)


def test_survivors_keep_every_bit_and_the_rest_is_zero() -> None:
    """In the weight and in each slot, where they are; what is dropped and grown again has survived."""
    before, after = torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([1, 0, 1, 0]).bool()
    weight, slot = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([-0.0, 5.0, 6.0, 7.0])
    places = (weight.data_ptr(), slot.data_ptr())
    topology.restart(weight, [slot], before, after)
    assert weight.tolist() == pytest.approx([0.1, 0, 0, 0])
    assert math.copysign(1, float(slot[0])) == -1
    assert slot[1:].tolist() == [0, 0, 0]
    assert (weight.data_ptr(), slot.data_ptr()) == places


@pytest.mark.parametrize("narrowed", [True, False])
def test_a_selection_needs_at_most_16_bytes_per_weight(narrowed: bool) -> None:
    """At 1024 x 1024 and 90 %, as torch's allocator counts them."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, 1024, 1024, generator=generator)
    mask = topology.scattered(weight, 2**20 // 10, generator)
    count = int(0.3 * int(mask.sum()))

    def select() -> object:
        return topology.by_selection(weight, gradient, mask, count, narrowed=narrowed)

    assert memory.peak_bytes(select, "cpu") <= 16 * 2**20
