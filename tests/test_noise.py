"""Noise is a pure function of (seed, step, layer, member), for every stream."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impls.perturbation import philox
from impls.perturbation.noise import BLOCK, STREAMS, NoiseStream
from impls.perturbation.population import perturb
from impls.schemes import Flipped, Permuted, Perturbed, SparsePerturbed

DRAWS = ("normal", "uniform", "words", "signs", "integers")


class Maker(Protocol):
    """Makes a stream of one kind."""

    def __call__(self, members: range, **changes: Any) -> NoiseStream:
        """Make a stream on the CPU."""
        ...


def maker(name: str) -> Maker:
    """Return what makes streams of that name."""

    def stream(members: range, **changes: Any) -> NoiseStream:
        base = STREAMS[name](0, 0, "layer", members, torch.device("cpu"), torch.float32)
        return replace(base, **changes)

    return stream


@pytest.fixture(params=STREAMS, scope="module")
def stream(request: pytest.FixtureRequest) -> Maker:
    """Every kind of stream in turn."""
    return maker(request.param)


def draw(name: str, stream: NoiseStream, width: int) -> Tensor:
    """Draw by a method's name, [m, width]."""
    drawn: Tensor = getattr(stream, name)("draw", *([1000] if name == "integers" else []), width)
    return drawn


@settings(max_examples=30)
@given(
    members=st.integers(BLOCK, 4 * BLOCK),
    width=st.integers(1, 4),
    seed=st.integers(0, 2**63),
    step=st.integers(0, 2**40),
)
def test_members_have_the_same_noise_however_the_population_is_split(
    stream: Maker, members: int, width: int, seed: int, step: int
) -> None:
    """Drawing block by block gives the bits of drawing all at once."""
    for name in DRAWS:
        whole = draw(name, stream(range(members), seed=seed, step=step), width)
        parts = [
            draw(name, stream(range(a, min(a + BLOCK, members)), seed=seed, step=step), width)
            for a in range(0, members, BLOCK)
        ]
        assert torch.equal(whole, torch.cat(parts))


@settings(max_examples=30)
@given(members=st.integers(1, 40), cuts=st.lists(st.integers(0, 40), max_size=4), width=st.integers(1, 9))
def test_philox_has_the_same_noise_wherever_the_population_is_split(
    members: int, cuts: list[int], width: int
) -> None:
    """Drawing any parts apart, not only blocks, gives the bits of drawing all at once."""
    stream = maker("philox")
    ends = [0, *sorted(min(cut, members) for cut in cuts), members]
    parts = [stream(range(*pair)) for pair in pairwise(ends)]
    for name in DRAWS:
        assert torch.equal(
            draw(name, stream(range(members)), width), torch.cat([draw(name, part, width) for part in parts])
        )
    whole = stream(range(members)).permutations("draw", 2, width)
    assert torch.equal(whole, torch.cat([part.permutations("draw", 2, width) for part in parts]))


def test_every_part_of_the_key_matters(stream: Maker) -> None:
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


def test_a_narrowed_stream_draws_what_the_whole_one_does(stream: Maker) -> None:
    """Any range of members, also inside a short last block, has the bits that the whole draws for it."""
    whole = stream(range(2 * BLOCK + 5))
    for name in DRAWS:
        bits = draw(name, whole, 3)
        for start, stop in (
            (1, 3),
            (BLOCK - 1, BLOCK + 2),
            (BLOCK, 2 * BLOCK),
            (2 * BLOCK + 1, 2 * BLOCK + 4),
        ):
            part = whole.narrow(start, stop)
            assert torch.equal(draw(name, part, 3), bits[start:stop])
            assert torch.equal(draw(name, part.narrow(1, 2), 3), bits[start + 1 : start + 2])


def test_pieces_of_a_stream_are_its_blocks() -> None:
    """Pieces cover the members in order and each lies in one block."""
    stream = maker("block")
    assert list(stream(range(2 * BLOCK + 5)).pieces(8, 1)) == [
        (0, BLOCK),
        (BLOCK, 2 * BLOCK),
        (2 * BLOCK, 2 * BLOCK + 5),
    ]
    narrow = stream(range(2 * BLOCK + 5)).narrow(BLOCK - 2, BLOCK + 3)
    assert list(narrow.pieces(8, 1)) == [(0, 2), (2, 5)]


def test_pieces_of_philox_hold_what_they_may() -> None:
    """Pieces cover the members in order, and each has as many as fit, at least one."""
    stream = maker("philox")(range(100, 107))
    assert list(stream.pieces(8, 24)) == [(0, 3), (3, 6), (6, 7)]
    assert list(stream.pieces(8, 1)) == [(at, at + 1) for at in range(7)]
    assert list(stream.pieces(0, 1)) == [(at, at + 1) for at in range(7)]


def test_what_members_share_is_drawn_once_and_apart(stream: Maker) -> None:
    """Shared draws are the same for every part of a population and unlike any member's own."""
    parts = [stream(range(BLOCK)), stream(range(BLOCK, 2 * BLOCK)), stream(range(2 * BLOCK)).narrow(3, 9)]
    drawn = [part.shared().normal("draw", 4) for part in parts]
    assert drawn[0].shape == (1, 4)
    assert all(torch.equal(drawn[0], other) for other in drawn)
    assert not bool((stream(range(1)).normal("draw", 4) == drawn[0]).any())


def test_names_that_run_together_are_different_keys(stream: Maker) -> None:
    """Layer "a" with draw "b/c" is not layer "a/b" with draw "c"."""
    first = stream(range(2), layer="a").normal("b/c", 4)
    assert not torch.equal(first, stream(range(2), layer="a/b").normal("c", 4))


@settings(max_examples=20)
@given(members=st.integers(1, 5), groups=st.integers(1, 3), width=st.integers(1, 70))
def test_permutations_are_permutations(stream: Maker, members: int, groups: int, width: int) -> None:
    """Every member and group gets each channel exactly once."""
    drawn = stream(range(members)).permutations("p", groups, width)
    assert drawn.shape == (members, groups, width)
    assert bool((drawn.sort(-1).values == torch.arange(width)).all())


def test_permutations_are_right_above_the_range_of_int16(stream: Maker) -> None:
    """With 40,000 channels every one appears once, and a layer of that width is permuted rightly."""
    width = 40_000
    drawn = stream(range(2)).permutations("p", 1, width)
    assert bool((drawn.sort(-1).values == torch.arange(width)).all())
    scheme, weight = Permuted(), torch.zeros(1, 2, width)
    noise = scheme.sample(weight, stream(range(2)))
    written = scheme.dense_noise(noise)
    assert noise.inputs is not None
    assert torch.equal(written[1, 0, :, noise.inputs[1, 0]], noise.core[0, 0])


@settings(max_examples=20)
@given(width=st.integers(1, 50), data=st.data())
def test_subsets_hold_different_channels(stream: Maker, width: int, data: st.DataObject) -> None:
    """A subset's channels are in range and never repeat."""
    size = data.draw(st.integers(1, width))
    drawn = stream(range(3)).subsets("s", 2, width, size)
    assert drawn.shape == (3, 2, size)
    for subset in drawn.flatten(0, 1).tolist():
        assert len(set(subset)) == size
        assert set(subset) <= set(range(width))


def test_sparse_columns_cover_all_inputs(stream: Maker) -> None:
    """Over many members every input column is perturbed about equally often."""
    noise = SparsePerturbed(2).sample(torch.zeros(1, 1, 10), stream(range(4 * BLOCK)))
    counts = torch.bincount(noise.columns.flatten(), minlength=10)
    expected = 4 * BLOCK * 2 / 10
    assert int(counts.min()) > 0.7 * expected
    assert int(counts.max()) < 1.3 * expected


def test_both_sides_of_a_square_layer_are_flipped_independently(stream: Maker) -> None:
    """Signs of inputs and outputs are different draws, also where they have the same shape."""
    noise = Flipped("both").sample(torch.zeros(1, 64, 64), stream(range(BLOCK)))
    assert noise.inputs is not None
    assert noise.outputs is not None
    assert abs((noise.inputs * noise.outputs).float().mean().item()) < 0.05


def test_both_sides_of_a_square_layer_are_permuted_independently(stream: Maker) -> None:
    """Picks of inputs and outputs are different draws, also where they have the same shape."""
    noise = Permuted("both").sample(torch.zeros(1, 64, 64), stream(range(BLOCK)))
    assert noise.inputs is not None
    assert noise.outputs is not None
    assert (noise.inputs == noise.outputs).float().mean().item() < 0.05


def test_signs_are_fair(stream: Maker) -> None:
    """Signs are +1 or -1, each about half of the time."""
    signs = stream(range(BLOCK)).signs("s", 100)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 0.05
    # Of 100 means and 99 correlations of 256 signs none is beyond 5 standard errors.
    assert float(signs.mean(0).abs().max()) < 5 / BLOCK**0.5
    assert float((signs[:, 1:] * signs[:, :-1]).mean(0).abs().max()) < 5 / BLOCK**0.5
    assert float((signs[1:] * signs[:-1]).mean(1).abs().max()) < 5 / 100**0.5
    assert torch.equal(replace(stream(range(BLOCK)), dtype=torch.int8).signs("s", 100), signs.to(torch.int8))


def test_signs_are_the_bits_of_words(stream: Maker) -> None:
    """Element e of a member's signs is +1 where bit e % 64 of its word e // 64 is set."""
    words = stream(range(9)).words("s", 3)
    assert words.dtype == torch.int64
    bits = (words.unsqueeze(2) >> torch.arange(64) & 1).flatten(1)[:, :150]
    assert torch.equal(stream(range(9)).signs("s", 10, 15).flatten(1), 2.0 * bits - 1)
    assert bool((stream(range(9)).words("s", 3, 1) == words.unsqueeze(2)).all())


def test_signs_are_written_in_pieces_that_leave_no_trace(
    stream: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many signs are written at a time changes none of them; no signs are no fault."""
    members = stream(range(BLOCK + 3))
    whole = members.signs("s", 7, 19)
    monkeypatch.setitem(philox.TILE, "cpu", 1)
    assert torch.equal(members.signs("s", 7, 19), whole)
    assert members.signs("s", 0, 5).shape == (BLOCK + 3, 0, 5)


def test_nothing_is_drawn_on_the_meta_device(stream: Maker) -> None:
    """Shapes and bytes can be had without memory."""
    nowhere = stream(range(2**20), device=torch.device("meta"))
    assert nowhere.normal("dense", 1024, 1024).nbytes == 2**42
    assert nowhere.signs("dense", 1024, 1024).nbytes == 2**42
    assert nowhere.words("dense", 16, 1024).nbytes == 2**37


def test_a_dtype_rounds_philox_normals() -> None:
    """With the stream philox a narrow type has the same noise, rounded, and a wide one has it exactly."""
    single = maker("philox")(range(3)).normal("draw", 50)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(maker("philox")(range(3), dtype=dtype).normal("draw", 50), single.to(dtype))


def test_philox_counts_members_to_the_last_word_but_one() -> None:
    """The last member that has a counter of its own is drawn, the next would be what all share: refused."""
    last = 2**32 - 2
    stream = maker("philox")
    drawn = stream(range(last, last + 1)).normal("draw", 8)
    assert not torch.equal(drawn, stream(range(1)).shared().normal("draw", 8))
    with pytest.raises(ValueError, match="too many: the stream philox counts"):
        stream(range(last, last + 2)).normal("draw", 8)


def test_philox_refuses_a_weight_that_has_more_elements_than_counters() -> None:
    """A shape whose counters would wrap is an error before anything is drawn."""
    stream = maker("philox")(range(1), device=torch.device("meta"))
    assert stream.normal("draw", 2**17, 2**17).shape == (1, 2**17, 2**17)
    with pytest.raises(ValueError, match="has no counter"):
        stream.normal("draw", 2**17, 2**17, 2)


def test_layers_that_a_stream_cannot_tell_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names with the same hash are refused with philox, by name; the stream block has no such pairs."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    perturb(model, Perturbed(), members=2, sigma=0.1, stream="philox")
    digest = philox.digest
    monkeypatch.setattr(philox, "digest", lambda name, bits: digest(name.replace("1.bias", "0.weight"), bits))
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.bias' have the same hash"):
        perturb(model, Perturbed(), members=2, sigma=0.1, stream="philox")
    perturb(model, Perturbed(), members=2, sigma=0.1, stream="block")
