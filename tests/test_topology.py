"""Which connections are dropped and grown, whatever the scores are."""

import ctypes
import ctypes.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    """Return the next mask, which must be one; few scores are narrowed down too, by as good as any bounds."""
    with patch.multiple(topology, SAMPLE=min(topology.SAMPLE, len(mask) // 3 + 1), FEW=1):
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
    (narrow, _), (wide, _) = (
        topology.by_selection(weight, gradient, mask, count, narrowed=flag) for flag in (True, False)
    )
    assert torch.equal(narrow, wide)
    assert narrow.shape == shape


@pytest.mark.parametrize("misled", ["too high", "too low", "all alike", "half zero", "few values"])
@pytest.mark.parametrize("kept", [2**10, 2**14, 2**16 + 2**15])
def test_a_sample_that_misleads_costs_no_connection(misled: str, kept: int) -> None:
    """Where the looked-at entries are larger or smaller than the others, or little tells them apart."""
    scores = 10 + torch.rand(2**17, generator=torch.Generator().manual_seed(1))
    seen = torch.randint(2**17, (topology.SAMPLE,), generator=torch.Generator().manual_seed(0))
    if misled == "all alike":
        scores[:] = 1.0
    elif misled == "half zero":
        scores[::2] = 0.0
    elif misled == "few values":
        scores = (4 * scores).round()
    else:
        scores[seen] += 5 if misled == "too high" else -5
    weight, mask = torch.zeros(2**17), torch.zeros(2**17, dtype=torch.bool)
    mask[:kept] = True
    after, _ = topology.by_selection(weight, scores, mask, kept, narrowed=True)
    assert int(after.sum()) == kept
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


def choice(side: int, density: float, alpha: float, *, narrowed: bool) -> Callable[[], object]:
    """Return an update of the connections of a weight [side, side]."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, side, side, generator=generator)
    mask = topology.scattered(weight, int(density * side * side), generator)
    count = int(alpha * int(mask.sum()))
    return lambda: topology.by_selection(weight, gradient, mask, count, narrowed=narrowed)


SHARES = (0.05, 0.3, 0.5, 0.7, 0.95)


@pytest.mark.parametrize("narrowed", [True, False])
def test_a_selection_needs_at_most_16_bytes_per_weight(narrowed: bool) -> None:
    """Whatever is connected and moves, as torch's allocator counts them."""
    found = {
        (density, alpha): memory.peak_bytes(choice(256, density, alpha, narrowed=narrowed), "cpu") / 2**16
        for density in SHARES
        for alpha in SHARES
    }
    assert max(found.values()) <= 16


@pytest.mark.skipif(not memory.can_limit(), reason="Linux says how much memory a process has had")
def test_a_narrowed_selection_needs_as_little_of_the_machine() -> None:
    """With what torch keeps behind its allocator's back: pairs of what it selects among."""
    status = Path("/proc/self/status")
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", lambda _: 0)

    def resident_bytes(name: str) -> int:
        (line,) = (line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(name))
        return 1024 * int(line.split()[1])

    found = {}
    for density in SHARES:
        for alpha in SHARES:
            call = choice(1024, density, alpha, narrowed=True)
            call()
            trim(0)
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before_bytes = resident_bytes("VmRSS")
            call()
            found[density, alpha] = (resident_bytes("VmHWM") - before_bytes) / 2**20
    assert max(found.values()) <= 16


@pytest.mark.parametrize(
    ("others", "count"),
    [(None, 2**17), ((0.5, 1.5), 2**16), ((1.5, 2.5), 2**17 + 99), ((0.0, 0.5), 2**17 + 99)],
    ids=["all alike", "half alike", "the least alike", "the largest alike"],
)
def test_ties_need_no_more_memory(
    others: tuple[float, float] | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of equal scores the first are taken, and few others are selected among."""
    right: Any = Tensor.topk
    sizes = [0]

    def topk(scores: Tensor, *given: Any, **named: Any) -> Any:
        sizes.append(len(scores))
        return right(scores, *given, **named)

    monkeypatch.setattr(Tensor, "topk", topk)
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.zeros(512, 512), torch.ones(512, 512)
    if others is not None:
        gradient[:, 1::2].uniform_(*others, generator=generator)
    mask = topology.scattered(weight, count, generator)
    after, _ = topology.by_selection(weight, gradient, mask, count, narrowed=True)
    assert max(sizes) <= 2**18 // topology.FEW
    assert int(after.sum()) == count
    assert gradient[after].min() >= gradient[~after].max()
