"""Noise is a pure function of (seed, step, layer, member), for every stream."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from esbench.registry import WrongResultError
from impls.kernels.dense_rng import FusedRegenerated
from impls.perturbation import philox
from impls.perturbation.noise import BLOCK, STREAMS, NoiseStream
from impls.perturbation.philox import Kind, Place
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import DropConnect, DropoutMask, Flipped, Loop, Permuted, Perturbed, SparsePerturbed
from impls.verify.checks import Setting, check_independence

DRAWS = ("normal", "uniform", "words", "signs", "integers")


class Maker(Protocol):
    """Makes a stream of one kind."""

    def __call__(self, members: range, **changes: Any) -> NoiseStream:
        """Make a stream on the CPU."""
        ...


def maker(name: str) -> Maker:
    """Return a function that makes streams of that name."""

    def stream(members: range, **changes: Any) -> NoiseStream:
        base = STREAMS[name](0, 0, "layer", members, torch.device("cpu"), torch.float32)
        return replace(base, **changes)

    return stream


@pytest.fixture(params=STREAMS, scope="module")
def stream(request: pytest.FixtureRequest) -> Maker:
    """Return a maker of each kind of stream in turn."""
    return maker(request.param)


def draw(name: str, stream: NoiseStream, width: int) -> Tensor:
    """Draw [m, width] values with the stream's method of this name."""
    drawn: Tensor = getattr(stream, name)("draw", *([1000] if name == "integers" else []), width)
    return drawn


@settings(max_examples=10)
@given(
    members=st.integers(BLOCK, 4 * BLOCK),
    width=st.integers(1, 4),
    seed=st.integers(0, 2**63),
    step=st.integers(0, 2**40),
)
def test_members_have_the_same_noise_however_the_population_is_split(
    stream: Maker, members: int, width: int, seed: int, step: int
) -> None:
    """Drawing block by block, or narrowing anywhere, gives the same bits as drawing all at once."""
    whole = stream(range(members), seed=seed, step=step)
    ranges = [(1, 3), (BLOCK - 1, min(BLOCK + 2, members)), (members - 2, members)]
    for name in DRAWS:
        bits = draw(name, whole, width)
        blocks = [
            stream(range(a, min(a + BLOCK, members)), seed=seed, step=step) for a in range(0, members, BLOCK)
        ]
        assert torch.equal(bits, torch.cat([draw(name, block, width) for block in blocks]))
        for start, stop in ranges:
            part = whole.narrow(start, stop)
            assert torch.equal(draw(name, part, width), bits[start:stop])
            assert torch.equal(draw(name, part.narrow(1, 2), width), bits[start + 1 : start + 2])


@settings(max_examples=20)
@given(members=st.integers(1, 40), cuts=st.lists(st.integers(0, 40), max_size=4), width=st.integers(1, 9))
def test_philox_has_the_same_noise_wherever_the_population_is_split(
    members: int, cuts: list[int], width: int
) -> None:
    """Drawing any parts separately, not only blocks, gives the same bits as drawing all at once."""
    stream = maker("philox")
    ends = [0, *sorted(min(cut, members) for cut in cuts), members]
    parts = [stream(range(*pair)) for pair in pairwise(ends)]
    whole = stream(range(members))
    for name in DRAWS:
        assert torch.equal(draw(name, whole, width), torch.cat([draw(name, part, width) for part in parts]))
    permuted = [part.permutations("draw", 2, width) for part in parts]
    assert torch.equal(whole.permutations("draw", 2, width), torch.cat(permuted))


def test_every_part_of_the_key_matters(stream: Maker) -> None:
    """Each part of the key changes the noise, the same key repeats it, and shared noise has its own key."""
    here = stream(range(BLOCK))
    reference = here.normal("draw", 3)
    others = [
        replace(here, seed=1).normal("draw", 3),
        replace(here, step=1).normal("draw", 3),
        replace(here, layer="other").normal("draw", 3),
        replace(here, members=range(BLOCK, 2 * BLOCK)).normal("draw", 3),
        here.normal("other", 3),
    ]
    assert not any(bool((reference == other).any()) for other in others)
    assert torch.equal(reference, here.normal("draw", 3))
    # Layer "a" with draw "b/c" is not layer "a/b" with draw "c".
    first, second = (
        replace(here, layer=layer).normal(name, 4) for layer, name in (("a", "b/c"), ("a/b", "c"))
    )
    assert not torch.equal(first, second)
    parts = [here, stream(range(BLOCK, 2 * BLOCK)), stream(range(2 * BLOCK)).narrow(3, 9)]
    shared = [part.shared().normal("draw", 3) for part in parts]
    assert shared[0].shape == (1, 3)
    assert all(torch.equal(shared[0], other) for other in shared)
    assert not bool((stream(range(1)).normal("draw", 3) == shared[0]).any())


def test_pieces_cover_the_members() -> None:
    """Each piece of the stream block lies in one block; pieces of philox have as many members as fit."""
    block = maker("block")(range(2 * BLOCK + 5))
    assert list(block.pieces(8, 1)) == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 5)]
    assert list(block.narrow(BLOCK - 2, BLOCK + 3).pieces(8, 1)) == [(0, 2), (2, 5)]
    stream = maker("philox")(range(100, 107))
    assert list(stream.pieces(8, 24)) == [(0, 3), (3, 6), (6, 7)]
    assert list(stream.pieces(8, 1)) == list(stream.pieces(0, 1)) == [(at, at + 1) for at in range(7)]


@settings(max_examples=10)
@given(groups=st.integers(1, 3), width=st.integers(1, 70), data=st.data())
def test_permutations_and_subsets(stream: Maker, groups: int, width: int, data: st.DataObject) -> None:
    """Permutations have each channel once per member and group; subsets have distinct channels in range."""
    permuted = stream(range(3)).permutations("p", groups, width)
    assert permuted.shape == (3, groups, width)
    assert bool((permuted.sort(-1).values == torch.arange(width)).all())
    size = data.draw(st.integers(1, width))
    subsets = stream(range(3)).subsets("s", groups, width, size)
    assert subsets.shape == (3, groups, size)
    for subset in subsets.flatten(0, 1).tolist():
        assert len(set(subset)) == size
        assert set(subset) <= set(range(width))


def test_permutations_are_right_above_the_range_of_int16(stream: Maker) -> None:
    """Permutations of 40,000 channels have each one once, and a layer of that width is permuted correctly."""
    width = 40_000
    drawn = stream(range(2)).permutations("p", 1, width)
    assert bool((drawn.sort(-1).values == torch.arange(width)).all())
    noise = Permuted().sample(torch.zeros(1, 2, width), stream(range(2)))
    assert noise.inputs is not None
    dense = Permuted().dense_noise(noise)
    assert torch.equal(dense[1, 0, :, noise.inputs[1, 0]], noise.core[0, 0])


def test_choices_are_fair_and_sides_independent(stream: Maker) -> None:
    """Sparse columns cover inputs evenly; flips and permutations of a layer's two sides are independent."""
    columns = SparsePerturbed(2).sample(torch.zeros(1, 1, 10), stream(range(4 * BLOCK))).columns
    counts = torch.bincount(columns.flatten(), minlength=10) / (4 * BLOCK * 2 / 10)
    assert 0.7 < float(counts.min()) <= float(counts.max()) < 1.3
    square = torch.zeros(1, 64, 64)
    flipped = Flipped("both").sample(square, stream(range(BLOCK)))
    permuted = Permuted("both").sample(square, stream(range(BLOCK)))
    assert flipped.inputs is not None
    assert flipped.outputs is not None
    assert permuted.inputs is not None
    assert permuted.outputs is not None
    assert abs((flipped.inputs * flipped.outputs).float().mean().item()) < 0.05
    assert (permuted.inputs == permuted.outputs).float().mean().item() < 0.05


def test_signs(stream: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign e is +1 where bit e % 64 of word e // 64 is set, in any dtype and tile size; signs are fair."""
    words = stream(range(9)).words("s", 3)
    assert words.dtype == torch.int64
    bits = (words.unsqueeze(2) >> torch.arange(64) & 1).flatten(1)[:, :150]
    assert torch.equal(stream(range(9)).signs("s", 10, 15).flatten(1), 2.0 * bits - 1)
    assert bool((stream(range(9)).words("s", 3, 1) == words.unsqueeze(2)).all())

    members = stream(range(BLOCK))
    signs = members.signs("s", 100)
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert abs(signs.mean().item()) < 0.05
    # None of the 100 means and 99 correlations of 256 signs is beyond 5 standard errors.
    assert float(signs.mean(0).abs().max()) < 5 / BLOCK**0.5
    assert float((signs[:, 1:] * signs[:, :-1]).mean(0).abs().max()) < 5 / BLOCK**0.5
    assert float((signs[1:] * signs[:-1]).mean(1).abs().max()) < 5 / 100**0.5
    assert torch.equal(replace(members, dtype=torch.int8).signs("s", 100), signs.to(torch.int8))

    monkeypatch.setitem(philox.TILE, "cpu", 1)
    assert torch.equal(members.signs("s", 100), signs)
    assert members.signs("s", 0, 5).shape == (BLOCK, 0, 5)


def test_nothing_is_drawn_on_the_meta_device(stream: Maker) -> None:
    """On the meta device noise has its shape and size in bytes, but takes no memory."""
    nowhere = stream(range(2**20), device=torch.device("meta"))
    assert nowhere.normal("dense", 1024, 1024).nbytes == 2**42
    assert nowhere.signs("dense", 1024, 1024).nbytes == 2**42
    assert nowhere.words("dense", 16, 1024).nbytes == 2**37


def test_a_dtype_rounds_philox_normals() -> None:
    """With the stream philox, narrow dtypes have the noise of float32 rounded, and float64 has it exactly."""
    single = maker("philox")(range(3)).normal("draw", 50)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(maker("philox")(range(3), dtype=dtype).normal("draw", 50), single.to(dtype))


def test_philox_counts_members_and_elements_to_the_end() -> None:
    """The last member with its own counter is drawn; more members or elements are refused, not wrapped."""
    last, stream = 2**32 - 2, maker("philox")
    drawn = stream(range(last, last + 1)).normal("draw", 8)
    assert not torch.equal(drawn, stream(range(1)).shared().normal("draw", 8))
    with pytest.raises(ValueError, match="too many: the stream philox counts"):
        stream(range(last, last + 2)).normal("draw", 8)
    meta = stream(range(1), device=torch.device("meta"))
    assert meta.normal("draw", 2**17, 2**17).shape == (1, 2**17, 2**17)
    with pytest.raises(ValueError, match="is outside the counter range"):
        meta.normal("draw", 2**17, 2**17, 2)


def test_layers_with_the_same_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With philox, parameters whose names have the same hash are refused; the stream block accepts them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    perturb(model, Perturbed(), members=2, sigma=0.1, stream="philox")
    digest = philox.digest
    monkeypatch.setattr(philox, "digest", lambda name, bits: digest(name.replace("1.bias", "0.weight"), bits))
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.bias' have the same hash"):
        perturb(model, Perturbed(), members=2, sigma=0.1, stream="philox")
    perturb(model, Perturbed(), members=2, sigma=0.1, stream="block")


def test_a_loop_has_the_noise_of_the_whole_population() -> None:
    """With the stream philox, a loop that draws each member alone has the noise stored for all members."""
    populations = [
        perturb(nn.Linear(3, 2), scheme, members=5, sigma=0.1, stream="philox")
        for scheme in (Loop(), Perturbed())
    ]
    first, second = (population.dense_noise(population.sample(1)) for population in populations)
    assert torch.equal(first["weight"], second["weight"])


def test_a_scheme_that_draws_in_kernels_refuses_another_stream() -> None:
    """A scheme that draws in kernels uses philox by default and refuses another stream before drawing."""
    pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")
    model = nn.Sequential(nn.Linear(8, 8, device="meta"))
    drawn = {"0": FusedRegenerated()}
    assert perturb(model, drawn, members=4, sigma=0.1).members == 4
    with pytest.raises(ValueError, match=r"FusedRegenerated.* philox: leave stream out.*'block'"):
        perturb(model, drawn, members=4, sigma=0.1, stream="block")


# In models of a narrow dtype, random choices are drawn in a wide one.

WIDTH, MEMBERS = 64, 20000


def drawn_in_bfloat16(scheme: AnyScheme, field: str, stream: str, members: int = MEMBERS) -> Tensor:
    """Return a field of the noise of a bfloat16 layer."""
    model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    population = perturb(model, scheme, members=members, sigma=0.1, stream=stream)
    (noise,) = population.sample(0).layers.values()
    part: Tensor = getattr(noise.weight, field)
    return part


@pytest.mark.parametrize("name", STREAMS)
def test_choices_in_narrow_models_have_no_ties(name: str) -> None:
    """In a bfloat16 model permutations swap half of all channel pairs, and dropout of 10 % drops a tenth."""
    places = drawn_in_bfloat16(Permuted(), "inputs", name).flatten(0, -2)
    first, second = torch.triu_indices(WIDTH, WIDTH, 1)
    turned = sum((part[:, first] > part[:, second]).sum().item() for part in places.split(1000))
    # Inversions of a random permutation have the variance w (w - 1) (2 w + 5) / 72.
    error = (WIDTH * (WIDTH - 1) * (2 * WIDTH + 5) / 72 / len(places)) ** 0.5 / len(first)
    assert abs(turned / len(places) / len(first) - 0.5) < 4 * error
    for scheme, members in ((DropoutMask(p=0.1), MEMBERS), (DropConnect(p=0.1), 500)):
        kept = drawn_in_bfloat16(scheme, "kept", name, members)
        dropped = 1 - kept.double().mean().item()
        assert abs(dropped - 0.1) < 4 * (0.1 * 0.9 / kept.numel()) ** 0.5


# Bugs that are planted in the counters of philox, and must be found.


@pytest.mark.parametrize(
    "words", ["between layers", "between weight and bias", "between steps", "between seeds"]
)
def test_a_counter_that_is_left_out_is_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds noise that repeats because a counter is left out, and passes without the bug."""
    original = Place.of

    def of(seed: int, step: int, layer: str, draw: str) -> Place:
        if words == "between layers":
            layer = layer.partition(".")[2]
        elif words == "between weight and bias":
            layer = layer.rpartition(".")[0]
        step, seed = 0 if words == "between steps" else step, 0 if words == "between seeds" else seed
        return original(seed, step, layer, draw)

    dense = Setting(Perturbed(), nn.Linear(6, 5).double(), (6,), stream="philox")
    monkeypatch.setattr(Place, "of", of)
    with pytest.raises(WrongResultError, match=words):
        check_independence(dense)
    monkeypatch.undo()
    check_independence(dense)


def test_members_that_share_a_counter_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds that members have the same noise when the member's counter is left out."""
    fill = philox.fill

    def without_member(values: Tensor, kind: Kind, place: Place, members: range, elements: range) -> Tensor:
        one = values.new_empty(1, values.shape[1])
        return values.copy_(fill(one, kind, place, range(members.start, members.start + 1), elements))

    monkeypatch.setattr(philox, "fill", without_member)
    with pytest.raises(WrongResultError, match="two members have the same noise"):
        check_independence(Setting(Perturbed(), nn.Linear(6, 5).double(), (6,), stream="philox"))
