"""Noise is a pure function of (seed, step, layer, member), for every stream, and its bits are fixed."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol
from unittest.mock import Mock

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import impls
from esbench.workload import WrongResultError
from impls.perturbation import noise, philox
from impls.perturbation.noise import BLOCK, SORTED_WIDTH, STREAMS, BlockStream, NoiseStream, PhiloxStream
from impls.perturbation.philox import Distribution, DrawKey
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import DropConnect, DropoutMask, Flipped, Permuted, Perturbed
from impls.verify.checks import Setting, check_independence
from tests.scheme_cases import make_stream

DRAWS = ("normal", "uniform", "words", "signs", "levels", "integers")


class Maker(Protocol):
    """Makes a stream of one kind."""

    def __call__(self, members: range, **changes: Any) -> NoiseStream:
        """Make a stream on the CPU with changed fields."""
        ...


def maker(name: str) -> Maker:
    """Return a function that makes streams of that name."""
    return lambda members, **changes: replace(make_stream(members, name=name, dtype=torch.float32), **changes)


@pytest.fixture(params=STREAMS, scope="module")
def stream(request: pytest.FixtureRequest) -> Maker:
    """Return a maker of each kind of stream in turn."""
    return maker(request.param)


def draw(name: str, stream: NoiseStream, width: int) -> Tensor:
    """Draw [m, width] values with the stream's method of this name."""
    values: Tensor = getattr(stream, name)("draw", *([1000] if name == "integers" else []), width)
    return values


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
    population = stream(range(members), seed=seed, step=step)
    ranges = [(1, 3), (BLOCK - 1, min(BLOCK + 2, members)), (members - 2, members)]
    for name in DRAWS:
        bits = draw(name, population, width)
        blocks = [
            stream(range(a, min(a + BLOCK, members)), seed=seed, step=step) for a in range(0, members, BLOCK)
        ]
        assert torch.equal(bits, torch.cat([draw(name, block, width) for block in blocks]))
        for start, stop in ranges:
            narrowed = population.narrow(start, stop)
            assert torch.equal(draw(name, narrowed, width), bits[start:stop])
            assert torch.equal(draw(name, narrowed.narrow(1, 2), width), bits[start + 1 : start + 2])


def test_every_field_of_the_key_changes_the_noise(stream: Maker) -> None:
    """The same key repeats the noise, a change of any field changes it; shared noise has a separate key."""
    base = stream(range(BLOCK))
    reference = base.normal("draw", 3)
    changed = [
        replace(base, seed=1).normal("draw", 3),
        replace(base, step=1).normal("draw", 3),
        replace(base, layer="other").normal("draw", 3),
        replace(base, members=range(BLOCK, 2 * BLOCK)).normal("draw", 3),
        base.normal("other", 3),
    ]
    assert not any(bool((reference == values).any()) for values in changed)
    assert torch.equal(reference, base.normal("draw", 3))
    # Layer "a" with draw "b/c" is not layer "a/b" with draw "c".
    first, second = (
        replace(base, layer=layer).normal(name, 4) for layer, name in (("a", "b/c"), ("a/b", "c"))
    )
    assert not torch.equal(first, second)
    parts = [base, stream(range(BLOCK, 2 * BLOCK)), stream(range(2 * BLOCK)).narrow(3, 9)]
    shared = [piece.shared().normal("draw", 3) for piece in parts]
    assert shared[0].shape == (1, 3)
    assert all(torch.equal(shared[0], values) for values in shared)
    assert not bool((stream(range(1)).normal("draw", 3) == shared[0]).any())


def test_pieces_cover_the_members() -> None:
    """Each piece of the stream block lies in one block; pieces of philox have as many members as fit."""
    block = maker("block")(range(2 * BLOCK + 5))
    assert list(block.pieces(8, 1)) == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 5)]
    assert list(block.narrow(BLOCK - 2, BLOCK + 3).pieces(8, 1)) == [(0, 2), (2, 5)]
    stream = maker("philox")(range(100, 107))
    assert list(stream.pieces(8, 24)) == [(0, 3), (3, 6), (6, 7)]
    assert list(stream.pieces(8, 1)) == list(stream.pieces(0, 1)) == [(at, at + 1) for at in range(7)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_parts_of_a_block_have_the_bits_of_the_block(dtype: torch.dtype) -> None:
    """Parts are drawn in turn if members draw multiples of 16 numbers, also those of an incomplete block.

    The parts of a block are drawn into the same memory.
    """
    whole = BlockStream(1, 2, "layer", range(2 * BLOCK + 5), torch.device("cpu"), dtype)
    for numbers, lengths in ((48, [100, 100, 56, 100, 100, 56, 5]), (6, [BLOCK, BLOCK, 5])):
        for draw in ("normal", "uniform", "signs", "levels"):
            parts = list(whole.split(numbers, 100 * numbers * dtype.itemsize))
            assert [stop - start for start, stop, _ in parts] == lengths
            drawn, places = [], set()
            for _, _, part in parts:
                values = getattr(part, draw)("a", numbers)
                places.add(values.data_ptr())
                drawn.append(values.clone())
            assert torch.equal(torch.cat(drawn), getattr(whole, draw)("a", numbers))
            assert numbers % 16 or len(places) <= 3 or (draw == "levels" and dtype != torch.float32)
    # What precedes a part of the population in its block has to be drawn, too.
    parts = list(whole.narrow(3, BLOCK + 2).split(48, 100 * 48 * dtype.itemsize))
    assert [stop - start for start, stop, _ in parts] == [BLOCK - 3, 2]
    values = torch.cat([part.normal("a", 48) for _, _, part in parts])
    assert torch.equal(values, whole.normal("a", 48)[3 : BLOCK + 2])


def test_threads_draw_the_same_bits_and_their_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a part of the population that ends within blocks, and in inference mode."""
    expected = {name: draw(name, maker("block")(range(7, 3 * BLOCK - 5), end=3 * BLOCK), 5) for name in DRAWS}
    monkeypatch.setattr(noise, "FEW_NUMBERS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads = Mock(wraps=ThreadPoolExecutor)
    monkeypatch.setattr("impls.perturbation.noise.ThreadPoolExecutor", threads)
    part = maker("block")(range(7, 3 * BLOCK - 5), end=3 * BLOCK)
    for name, values in expected.items():
        with torch.inference_mode():
            inferred = draw(name, part, 5)
        assert torch.equal(inferred, values)
        assert torch.equal(draw(name, part, 5), values)
    assert threads.call_count == 2 * len(DRAWS)
    monkeypatch.setattr(noise.BlockStream, "_block_seed", Mock(side_effect=OverflowError("too large")))
    with pytest.raises(OverflowError, match="too large"):
        draw("normal", part, 5)


def test_permutations_and_subsets_have_distinct_channels(stream: Maker) -> None:
    """Permutations have each channel once per member and group; subsets have distinct channels in range."""
    for groups, width in ((1, 1), (3, 70), (7, 300), (1, 40_000)):  # the last is above the range of int16
        permutations = stream(range(3)).permutations("p", groups, width)
        assert permutations.shape == (3, groups, width)
        assert bool((permutations.sort(-1).values == torch.arange(width)).all())
        assert torch.equal(stream(range(3)).narrow(1, 3).permutations("p", groups, width), permutations[1:])
        if width <= SORTED_WIDTH or isinstance(stream(range(3)), PhiloxStream):
            keys = stream(range(3)).uniform("p", groups, width)
            assert torch.equal(permutations, keys.argsort(dim=-1, stable=True))
        for size in {1, (width + 1) // 2, width}:
            subsets = stream(range(3)).subsets("s", groups, width, size)
            assert subsets.shape == (3, groups, size)
            assert 0 <= int(subsets.min()) <= int(subsets.max()) < width
            assert bool((subsets.sort(-1).values.diff(dim=-1) > 0).all())


def test_the_two_sides_of_a_layer_are_independent(stream: Maker) -> None:
    """Flips and permutations of a layer's inputs are independent of those of its outputs."""
    weight = torch.zeros(1, 64, 64)
    flipped: Any = Flipped("both").sample(weight, stream(range(BLOCK)))
    permuted: Any = Permuted("both").sample(weight, stream(range(BLOCK)))
    assert abs((flipped.inputs * flipped.outputs).float().mean().item()) < 0.05
    assert (permuted.inputs == permuted.outputs).float().mean().item() < 0.05


def test_signs_are_the_bits_of_words_and_fair(stream: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign e is +1 where bit e % 64 of word e // 64 is set, in any dtype and tile size; signs are fair."""
    words = stream(range(9)).words("s", 3)
    assert words.dtype == torch.int64
    bits = (words.unsqueeze(2) >> torch.arange(64) & 1).flatten(1)[:, :150]
    assert torch.equal(stream(range(9)).signs("s", 10, 15).flatten(1), 2.0 * bits - 1)

    members = stream(range(BLOCK))
    signs = members.signs("s", 100)
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
    meta = stream(range(2**20), device=torch.device("meta"))
    assert meta.normal("dense", 1024, 1024).nbytes == 2**42
    assert meta.signs("dense", 1024, 1024).nbytes == 2**42
    assert meta.levels("dense", 1024, 1024).nbytes == 2**42
    assert meta.words("dense", 16, 1024).nbytes == 2**37


def test_levels_have_the_moments_of_their_law() -> None:
    """Over all 256 bytes the mean and the third moment are 0, the others and the range are as documented."""
    words = torch.arange(256, dtype=torch.uint8).view(torch.int64).unsqueeze(0)
    levels = philox.fill_levels(torch.empty(1, 256), words)[0].double()
    assert torch.equal(levels, -levels.flip(0))  # symmetric, so that odd moments are 0
    step, count = 14189 / 2**20, 256
    assert levels.diff().unique().tolist() == [step]
    for power, closed_form, stated in (
        (2, step**2 * (count**2 - 1) / 12, 0.99999),
        (4, step**4 * (count**2 - 1) * (3 * count**2 - 7) / 240, 1.79993),
    ):
        assert levels.pow(power).mean().item() == pytest.approx(closed_form, rel=1e-12)
        assert closed_form == pytest.approx(stated, abs=5e-6)
    assert levels.max().item() == step * (count - 1) / 2 == pytest.approx(1.7253, abs=5e-5)


def test_levels_are_the_bytes_of_words_and_uniform(stream: Maker) -> None:
    """Level e is that of byte e % 8 of word e // 8, rounded to any dtype; they are fair and independent."""
    words = stream(range(9)).words("s", 3)
    bytes_ = (words.unsqueeze(2) >> 8 * torch.arange(8) & 255).flatten(1)[:, :20]
    levels = stream(range(9)).levels("s", 4, 5)
    assert torch.equal(levels.flatten(1).double(), (bytes_.double() - 127.5) * (14189 / 2**20))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        narrow = stream(range(9), dtype=dtype).levels("s", 4, 5)
        assert narrow.dtype == dtype
        assert torch.equal(narrow, levels.to(dtype))
    assert stream(range(9)).levels("s", 0, 5).shape == (9, 0, 5)

    members = stream(range(BLOCK)).levels("s", 1000)
    counts = members.flatten().unique(return_counts=True)[1]
    assert len(counts) == 256
    assert 0.001 < scipy.stats.chisquare(counts).pvalue < 0.999
    pairs = [(members[:, 1:], members[:, :-1]), (members[1:], members[:-1])]
    for moment in (members, members**3, *(a * b for a, b in pairs), *((a * b) ** 2 - 1 for a, b in pairs)):
        assert moment.mean().abs() < 5 * moment.std() / moment.numel() ** 0.5


def test_narrow_dtypes_have_rounded_philox_normals() -> None:
    """With the stream philox, narrow dtypes have the noise of float32 rounded, and float64 has it exactly."""
    single = maker("philox")(range(3)).normal("draw", 50)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(maker("philox")(range(3), dtype=dtype).normal("draw", 50), single.to(dtype))


def test_philox_has_noise_for_every_member_up_to_the_limit_of_its_counter() -> None:
    """The last member is drawn and differs from shared noise; one member more is refused, not wrapped."""
    last, stream = 2**32 - 2, maker("philox")
    drawn = stream(range(last, last + 1)).normal("draw", 8)
    assert not torch.equal(drawn, stream(range(1)).shared().normal("draw", 8))
    with pytest.raises(ValueError, match="too many: the stream 'philox' has"):
        stream(range(last, last + 2)).normal("draw", 8)


def test_layers_with_the_same_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With philox, parameters whose names have the same hash are refused; the stream block accepts them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    perturb(model, Perturbed(), members=2, sigma=0.1, stream="philox")
    digest = philox.hash_name
    monkeypatch.setattr(
        philox, "hash_name", lambda name, bits: digest(name.replace("1.bias", "0.weight"), bits)
    )
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.bias' have the same hash"):
        perturb(model, Perturbed(), members=2, sigma=0.1, stream="philox")
    perturb(model, Perturbed(), members=2, sigma=0.1, stream="block")


WIDTH, MEMBERS = 64, 20000


@pytest.mark.parametrize("name", STREAMS)
def test_choices_in_narrow_models_have_no_ties(name: str) -> None:
    """In a bfloat16 model permutations swap half of all channel pairs, and dropout of 10 % drops a tenth."""

    def sample(scheme: AnyScheme, field: str, members: int) -> Tensor:
        model = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
        population = perturb(model, scheme, members=members, sigma=0.1, stream=name)
        (noise,) = population.sample(0).layers.values()
        values: Tensor = getattr(noise.weight, field)
        return values

    channels = sample(Permuted(), "inputs", MEMBERS).flatten(0, -2)
    first, second = torch.triu_indices(WIDTH, WIDTH, 1)
    swapped = sum((piece[:, first] > piece[:, second]).sum().item() for piece in channels.split(1000))
    # Inversions of a random permutation have the variance w (w - 1) (2 w + 5) / 72.
    error = (WIDTH * (WIDTH - 1) * (2 * WIDTH + 5) / 72 / len(channels)) ** 0.5 / len(first)
    assert abs(swapped / len(channels) / len(first) - 0.5) < 4 * error
    for scheme, members in ((DropoutMask(p=0.1), MEMBERS), (DropConnect(p=0.1), 500)):
        kept = sample(scheme, "kept", members)
        dropped = 1 - kept.double().mean().item()
        assert abs(dropped - 0.1) < 4 * (0.1 * 0.9 / kept.numel()) ** 0.5


@pytest.mark.parametrize(
    "words", ["between layers", "between weight and bias", "between steps", "between seeds", "two members"]
)
def test_a_missing_counter_is_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of independence finds noise that repeats because a counter of philox is left out."""
    make_key, fill = DrawKey.of, philox.fill

    def of(seed: int, step: int, layer: str, draw: str) -> DrawKey:
        if words == "between layers":
            layer = layer.partition(".")[2]
        elif words == "between weight and bias":
            layer = layer.rpartition(".")[0]
        step, seed = 0 if words == "between steps" else step, 0 if words == "between seeds" else seed
        return make_key(seed, step, layer, draw)

    def without_member(
        values: Tensor, distribution: Distribution, key: DrawKey, members: range, elements: range
    ) -> Tensor:
        first = values.new_empty(1, values.shape[1])
        return values.copy_(fill(first, distribution, key, range(members.start, members.start + 1), elements))

    dense = Setting(Perturbed(), nn.Linear(6, 5).double(), (6,), stream="philox")
    check_independence(dense)
    monkeypatch.setattr(DrawKey, "of", of)
    if words == "two members":
        monkeypatch.setattr(philox, "fill", without_member)
    with pytest.raises(WrongResultError, match=words):
        check_independence(dense)


# The same bits in every version.

DIGESTS = {
    (impls.LowRankSign(), "block"): "e7e9aab62a9f9f3f",
    (impls.LowRankSign(), "philox"): "8d96b57844378239",
    (impls.FlippedSign(), "block"): "31a0070390c40fda",
    (impls.FlippedSign(), "philox"): "e14dbc4b6570f1ac",
    (impls.DropoutMask(), "block"): "d23f87bb388cb94b",
    (impls.DropoutMask(), "philox"): "985c1caa4a8047d5",
    (impls.Binary(), "block"): "2fb2c94a6ade15c2",
    (impls.Binary(), "philox"): "757f2fded2e7d487",
    (impls.Regenerated("uniform"), "block"): "2969d6f0e63b3303",
    (impls.Regenerated("uniform"), "philox"): "f32071d38cf6fe99",
}
"""Digests of noise made of integers, which do not depend on how a machine computes a logarithm or a sine."""

NORMALS = {
    "block": [-0.607851, 0.190422, -0.636018, 1.781533, 1.188453, -0.63381, 1.218874],
    "philox": [-0.034984, 0.972338, 0.01562, -0.680066, 0.103428, -0.837833, 0.94951],
}
"""Entries of dense noise, which differ between machines by a few roundings of float32."""

STORED_ENTRIES = [0, 1, 2, 3, 349, 350, 699]


def draw_stored(scheme: AnyScheme, stream: str) -> Tensor:
    """Return the dense noise of two members of a small layer at seed 7 and step 11."""
    layer = impls.BinarizedLinear if isinstance(scheme, impls.Binary) else nn.Linear
    model = layer(70, 5, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-2, 2, 350).view(5, 70))
    population = perturb(model, scheme, members=2, sigma=0.1, seed=7, stream=stream)
    return population.dense_noise(population.sample(11))["weight"]


@pytest.mark.parametrize(("scheme", "stream"), DIGESTS, ids=str)
def test_integers_have_the_stored_bits(scheme: AnyScheme, stream: str) -> None:
    """Signs, gates, bits and levels, written out as weights, have the stored digest."""
    entries = (draw_stored(scheme, stream) * 2**20).round().to(torch.int64)
    digest = hashlib.blake2b(entries.numpy().tobytes(), digest_size=8).hexdigest()
    assert digest == DIGESTS[scheme, stream]


@pytest.mark.parametrize("stream", NORMALS)
def test_normals_have_the_stored_values(stream: str) -> None:
    """Dense noise has the stored entries, up to a few roundings of float32."""
    entries = draw_stored(impls.Perturbed(), stream).flatten()[STORED_ENTRIES].tolist()
    assert entries == pytest.approx(NORMALS[stream], abs=2e-6)
