"""Noise is a pure function of (seed, step, layer, block of members)."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from impls.noise import BLOCK, BlockStream, NoiseStream
from impls.schemes import Flipped, Permuted, SparsePerturbed

DRAWS = ("normal", "uniform", "signs")


def stream(members: range, **changes: Any) -> NoiseStream:
    """Make a stream on the CPU."""
    base = BlockStream(0, 0, "layer", members, torch.device("cpu"), torch.float32)
    return replace(base, **changes)


@settings(max_examples=30)
@given(
    blocks=st.integers(1, 3),
    rest=st.integers(0, BLOCK - 1),
    width=st.integers(1, 4),
    seed=st.integers(0, 2**63),
    step=st.integers(0, 2**40),
)
def test_members_have_the_same_noise_however_the_population_is_split(
    blocks: int, rest: int, width: int, seed: int, step: int
) -> None:
    """Drawing block by block gives the bits of drawing all at once."""
    members = blocks * BLOCK + rest
    for name in DRAWS:
        whole = getattr(stream(range(members), seed=seed, step=step), name)("draw", width)
        parts = [
            getattr(stream(range(a, min(a + BLOCK, members)), seed=seed, step=step), name)("draw", width)
            for a in range(0, members, BLOCK)
        ]
        assert torch.equal(whole, torch.cat(parts))


def test_every_part_of_the_key_matters() -> None:
    """Another seed, step, layer, draw or block gives other noise."""
    here = stream(range(BLOCK))
    reference = here.normal("draw", 3)
    others = [
        replace(here, seed=1).normal("draw", 3),
        replace(here, step=1).normal("draw", 3),
        replace(here, layer="other").normal("draw", 3),
        replace(here, members=range(BLOCK, 2 * BLOCK)).normal("draw", 3),
        here.normal("other", 3),
    ]
    for other in others:
        assert not bool((reference == other).any())
    assert torch.equal(reference, here.normal("draw", 3))


def test_a_narrowed_stream_draws_what_the_whole_one_does() -> None:
    """Any range of members, also inside a short last block, has the bits that the whole draws for it."""
    whole = stream(range(2 * BLOCK + 5))
    for name in DRAWS:
        bits = getattr(whole, name)("draw", 3)
        for start, stop in (
            (1, 3),
            (BLOCK - 1, BLOCK + 2),
            (BLOCK, 2 * BLOCK),
            (2 * BLOCK + 1, 2 * BLOCK + 4),
        ):
            part = whole.narrow(start, stop)
            assert torch.equal(getattr(part, name)("draw", 3), bits[start:stop])
            assert torch.equal(getattr(part.narrow(1, 2), name)("draw", 3), bits[start + 1 : start + 2])


def test_pieces_of_a_stream_are_its_blocks() -> None:
    """Pieces cover the members in order and each lies in one block."""
    assert list(stream(range(2 * BLOCK + 5)).pieces(8, 1)) == [
        (0, BLOCK),
        (BLOCK, 2 * BLOCK),
        (2 * BLOCK, 2 * BLOCK + 5),
    ]
    narrow = stream(range(2 * BLOCK + 5)).narrow(BLOCK - 2, BLOCK + 3)
    assert list(narrow.pieces(8, 1)) == [(0, 2), (2, 5)]


def test_what_members_share_is_drawn_once_and_apart() -> None:
    """Shared draws are the same for every part of a population and unlike any member's own."""
    parts = [stream(range(BLOCK)), stream(range(BLOCK, 2 * BLOCK)), stream(range(2 * BLOCK)).narrow(3, 9)]
    drawn = [part.shared().normal("draw", 4) for part in parts]
    assert drawn[0].shape == (1, 4)
    assert all(torch.equal(drawn[0], other) for other in drawn)
    assert not bool((stream(range(1)).normal("draw", 4) == drawn[0]).any())


def test_names_that_run_together_are_different_keys() -> None:
    """Layer "a" with draw "b/c" is not layer "a/b" with draw "c"."""
    first = stream(range(2), layer="a").normal("b/c", 4)
    assert not torch.equal(first, stream(range(2), layer="a/b").normal("c", 4))


@settings(max_examples=20)
@given(members=st.integers(1, 5), groups=st.integers(1, 3), width=st.integers(1, 70))
def test_permutations_are_permutations(members: int, groups: int, width: int) -> None:
    """Every member and group gets each channel exactly once."""
    drawn = stream(range(members)).permutations("p", groups, width)
    assert drawn.shape == (members, groups, width)
    assert bool((drawn.sort(-1).values == torch.arange(width)).all())


def test_permutations_are_right_above_the_range_of_int16() -> None:
    """With 40,000 channels every one appears once, and a layer of that width is permuted rightly."""
    width = 40_000
    drawn = stream(range(2)).permutations("p", 1, width)
    assert bool((drawn.sort(-1).values == torch.arange(width)).all())
    scheme, weight = Permuted(), torch.zeros(1, 2, width)
    noise = scheme.sample(weight, stream(range(2)))
    written = scheme.perturbations(noise)
    assert noise.inputs is not None
    assert torch.equal(written[1, 0, :, noise.inputs[1, 0]], noise.core[0])


@settings(max_examples=20)
@given(width=st.integers(1, 50), data=st.data())
def test_subsets_hold_different_channels(width: int, data: st.DataObject) -> None:
    """A subset's channels are in range and never repeat."""
    size = data.draw(st.integers(1, width))
    drawn = stream(range(3)).subsets("s", 2, width, size)
    assert drawn.shape == (3, 2, size)
    for subset in drawn.flatten(0, 1).tolist():
        assert len(set(subset)) == size
        assert set(subset) <= set(range(width))


def test_sparse_columns_cover_all_inputs() -> None:
    """Over many members every input column is perturbed about equally often."""
    noise = SparsePerturbed(2).sample(torch.zeros(1, 1, 10), stream(range(4 * BLOCK)))
    counts = torch.bincount(noise.columns.flatten(), minlength=10)
    expected = 4 * BLOCK * 2 / 10
    assert int(counts.min()) > 0.7 * expected
    assert int(counts.max()) < 1.3 * expected


def test_both_sides_of_a_square_layer_are_flipped_independently() -> None:
    """Signs of inputs and outputs are different draws, also where they have the same shape."""
    noise = Flipped("both").sample(torch.zeros(1, 64, 64), stream(range(BLOCK)))
    assert noise.inputs is not None
    assert noise.outputs is not None
    assert abs((noise.inputs * noise.outputs).mean().item()) < 0.05


def test_both_sides_of_a_square_layer_are_permuted_independently() -> None:
    """Picks of inputs and outputs are different draws, also where they have the same shape."""
    noise = Permuted("both").sample(torch.zeros(1, 64, 64), stream(range(BLOCK)))
    assert noise.inputs is not None
    assert noise.outputs is not None
    assert (noise.inputs == noise.outputs).float().mean().item() < 0.05


def test_signs_are_fair() -> None:
    """Signs are +1 or -1, each about half of the time."""
    signs = stream(range(BLOCK)).signs("s", 100)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 0.05


def test_nothing_is_drawn_on_the_meta_device() -> None:
    """Shapes and bytes can be had without memory."""
    big = stream(range(2**20), device=torch.device("meta")).normal("dense", 1024, 1024)
    assert big.nbytes == 2**42
