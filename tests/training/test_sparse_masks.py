"""Which entries of a weight are active: how many per layer, at random, and after an update."""

import ctypes
import ctypes.util
import itertools
import math
from functools import partial
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor, nn

from esbench.measure import memory
from impls.benchmark.training.memory_reclaim import reset_peak, status_bytes
from impls.benchmark.training.topology_update import drop_and_grow_by_sorting
from impls.training import sparse_masks
from impls.training.sparse_masks import Distribution, allocate, drop_and_grow, erk, random_mask, sparsifiable
from tests.training.models import text_model


def test_weights_that_can_be_sparse() -> None:
    """Trainable weights of linear and convolutional layers can be sparse, unless something else uses them."""
    model = text_model()
    assert list(sparsifiable(model)) == ["2.weight", "5.weight", "7.weight"]
    model.get_submodule("5").requires_grad_(requires_grad=False)
    nn.utils.parametrizations.weight_norm(model.get_submodule("7"))
    assert list(sparsifiable(model)) == ["2.weight"]
    tied = nn.ModuleDict({"words": nn.Embedding(9, 4), "scores": nn.Linear(4, 9), "plain": nn.Linear(4, 4)})
    tied["scores"].weight = tied["words"].weight
    assert list(sparsifiable(tied)) == ["plain.weight"]
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert list(sparsifiable(nn.Sequential(first, nn.Tanh(), second, first))) == ["0.weight"]
    nested = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 2)))
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"ignore": ["1"]}, ["0.weight", "2.0.weight"]),
        ({"ignore": ["2"]}, ["0.weight", "1.weight"]),
        ({"ignore_linear_layers": True}, ["0.weight"]),
    ]
    for options, expected in cases:
        assert list(sparsifiable(nested, **options)) == expected


def test_erk_densities_by_hand() -> None:
    """Densities are proportional to the sum of a layer's dimensions over their product, at most 1."""
    cases: list[tuple[list[tuple[int, ...]], float, list[float]]] = [
        # 138 / 1280 caps the last layer at 1; (12928 - 1280) / 448 = 26 is left for the others
        ([(128, 64), (128, 128), (10, 128)], 0.5, [0.609375, 0.40625, 1.0]),
        # kernel sizes are dimensions: 73 / 1728 and 134 / 36864 times 3859.2 / 207
        ([(64, 3, 3, 3), (64, 64, 3, 3)], 0.1, [0.787602, 0.067769]),
        ([(4, 4), (4, 4)], 1.0, [1.0, 1.0]),
        # 0.65 * 80 / 24 * 8 / 16 = 1.083 is capped; (52 - 16) / 64 is left
        ([(4, 4), (8, 8)], 0.65, [1.0, 0.5625]),
        ([(10, 10)], 0.3, [0.3]),
        ([(2, 2), (2, 2)], 0.99, [0.99, 0.99]),
    ]
    for shapes, density, expected in cases:
        densities = erk(shapes, density)
        assert [float(each) for each in densities] == pytest.approx(expected, rel=1e-5)
        sizes = [math.prod(shape) for shape in shapes]
        active = sum(each * size for each, size in zip(densities, sizes, strict=True))
        assert float(active) == pytest.approx(density * sum(sizes))


def test_the_number_of_zeros_is_exact() -> None:
    """floor((1 - density) n), for decimals as they are written; uniform leaves the first layer dense."""
    cases = {0.9: 10, 0.7: 30, 0.8: 20, 0.4: 60, 0.1: 90, 1 - 0.9: 90, 1 - 0.7: 70, 1 / 3: 66}
    for density, zeros in cases.items():
        for distribution in get_args(Distribution):
            alone = allocate(sparsifiable(nn.Linear(10, 10)), density, distribution, "weight")
            assert alone == {"weight": 100 - zeros}
        pair = sparsifiable(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))
        assert list(allocate(pair, density, "erk", "0.weight").values()) == [100 - zeros, 100 - zeros]
        assert list(allocate(pair, density, "uniform", "0.weight").values()) == [100, 100 - zeros]
        assert list(allocate(pair, density, "uniform", "ignored").values()) == [100 - zeros, 100 - zeros]


SCORES = ("distinct", "tied", "zero", "huge", "nan in weights")


def drawn(scores: str, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight, a gradient and a mask [size]; inactive weights are zero."""
    generator = Generator().manual_seed(seed)
    weight, gradient = torch.randn(2, size, generator=generator)
    if scores == "tied":
        weight, gradient = weight.sign(), gradient.sign()
    elif scores == "zero":
        weight, gradient = torch.zeros(2, size)
    elif scores == "huge":
        weight = weight * 1e38 * 10
    mask = random_mask(weight, int(torch.randint(size + 1, (), generator=generator)), generator)
    weight = weight.masked_fill(~mask, 0)
    if scores == "nan in weights":
        weight[: size // 2] = math.nan
    return weight, gradient, mask


def moved(weight: Tensor, gradient: Tensor, mask: Tensor, count: int, *, narrowed: bool) -> Tensor:
    """Return the next mask; small weights are sampled too."""
    sample = min(sparse_masks.SAMPLE, len(mask) // 3 + 1)
    with patch.multiple(sparse_masks, SAMPLE=sample, CANDIDATES=1):
        after, is_finite = drop_and_grow(weight, gradient, mask, count, narrowed=narrowed)
    assert bool(is_finite)
    return after


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCORES), st.integers(1, 400), st.integers(0, 99), st.floats(0, 1), st.booleans())
def test_the_right_entries_are_dropped_and_grown(
    scores: str, size: int, seed: int, share: float, narrowed: bool
) -> None:
    """Counts are exact with ties, zeros, infinities and NaN; distinct scores agree with sorted lists.

    A dropped entry may be grown again.
    """
    weight, gradient, mask = drawn(scores, size, seed)
    nonzero = int(mask.sum())
    count = int(share * nonzero)
    after = moved(weight, gradient, mask, count, narrowed=narrowed)
    assert int(after.sum()) == nonzero
    assert int((mask & after).sum()) >= nonzero - count
    if scores == "distinct":
        active = sorted(mask.nonzero().flatten().tolist(), key=lambda at: abs(float(weight[at])))
        stays = set(active[count:])
        candidates = sorted(set(range(size)) - stays, key=lambda at: -abs(float(gradient[at])))
        assert set(after.nonzero().flatten().tolist()) == stays | set(candidates[:count])
        shape = (1, size, 1)
        rows = weight.view(shape), gradient.view(shape), mask.view(shape)
        by_sorting = drop_and_grow_by_sorting(rows[0], rows[1], rows[2], count)
        assert torch.equal(by_sorting.view(-1), after)


@pytest.mark.parametrize("misled", ["too high", "too low", "all alike", "half zero", "few values"])
def test_the_largest_scores_are_selected_even_if_the_sample_misleads(misled: str) -> None:
    """Sampled scores may be larger or smaller than the others, or many scores may be equal."""
    for nonzero in (2**10, 2**14, 2**16 + 2**15):
        scores = 10 + torch.rand(2**17, generator=Generator().manual_seed(1))
        sampled = torch.randint(2**17, (sparse_masks.SAMPLE,), generator=Generator().manual_seed(0))
        if misled == "all alike":
            scores[:] = 1.0
        elif misled == "half zero":
            scores[::2] = 0.0
        elif misled == "few values":
            scores = (4 * scores).round()
        else:
            scores[sampled] += 5 if misled == "too high" else -5
        mask = torch.zeros(2**17, dtype=torch.bool)
        mask[:nonzero] = True
        after, _ = drop_and_grow(torch.zeros(2**17), scores, mask, nonzero, narrowed=True)
        assert int(after.sum()) == nonzero
        assert scores[after].min() >= scores[~after].max()


@pytest.mark.parametrize("narrowed", [True, False])
def test_a_non_finite_gradient_moves_nothing(narrowed: bool) -> None:
    """A single NaN or infinity is enough, and the second result is False."""
    for bad in (math.nan, math.inf, -math.inf):
        weight, gradient, mask = drawn("distinct", 50, 1)
        gradient[7] = bad
        after, is_finite = drop_and_grow(weight, gradient, mask, 3, narrowed=narrowed)
        assert not bool(is_finite)
        assert torch.equal(after, mask)


def test_a_selection_needs_at_most_16_bytes_per_weight() -> None:
    """Torch's allocator counts the bytes; for a narrowed selection also the process, with topk's pairs."""
    trim = getattr(ctypes.CDLL(ctypes.util.find_library("c")), "malloc_trim", lambda _: 0)
    shares = ((0.05, 0.95), (0.5, 0.5), (0.95, 0.05), (0.95, 0.95))
    for (density, alpha), tied in itertools.product(shares, (False, True)):
        generator = Generator().manual_seed(0)
        weight, gradient = torch.randn(2, 1024, 1024, generator=generator)
        if tied:  # half of the gradients are equal
            gradient[:, ::2] = 1.0
        mask = random_mask(weight, int(density * 2**20), generator)
        count = int(alpha * int(mask.sum()))
        narrow = partial(drop_and_grow, weight, gradient, mask, count, narrowed=True)
        if not tied:
            full = partial(drop_and_grow, weight, gradient, mask, count, narrowed=False)
            assert max(memory.peak_bytes(call, "cpu") for call in (narrow, full)) <= 16 * 2**20
        narrow()
        trim(0)
        before_bytes = reset_peak()  # None if the system does not report it
        narrow()
        assert before_bytes is None or status_bytes("VmHWM") - before_bytes <= 16 * 2**20, (density, alpha)
