"""Each fused variant passes the checks of all schemes, and errs at most twice as much as plain torch."""

import msgspec
import pytest
import torch
from torch import nn

from esbench.registry import REGISTRY, Entry, UnavailableError, build, load
from esbench.schema import Case
from impls.kernels import (
    FusedBinary,
    FusedHadamard,
    FusedLowRank,
    FusedLowRankSign,
    FusedRegenerated,
    FusedRegeneratedSign,
    dense_rng,
)
from impls.perturbation.noise import STREAMS
from impls.perturbation.population import perturb
from impls.perturbation.scheme import AnyScheme
from impls.schemes import Binary
from tests.kernels.launched.canaries import DEVICE, normal
from tests.workload_cases import pairs

load("impls")

ENTRIES = REGISTRY.select(("Fused*",))
EXACT = [
    Case(operator="Linear", out_channels=5, in_channels=6, bias=True, members=8, dtype="float64"),
    Case(
        operator="Conv2d",
        out_channels=5,
        in_channels=6,
        kernel_size=(1, 1),
        input_size=(3, 4),
        bias=True,
        members=8,
        dtype="float64",
    ),
    Case(operator="BinarizedLinear", out_channels=5, in_channels=70, bias=True, members=8, dtype="float64"),
    Case(
        operator="BinarizedConv2d",
        out_channels=4,
        in_channels=6,
        kernel_size=(1, 2),
        input_size=(3, 4),
        padding=(1, 0),
        bias=True,
        members=8,
        dtype="float64",
    ),
]
LARGER = [
    Case(operator="Linear", out_channels=70, in_channels=150, members=45, repeats=2, bias=True),
    Case(operator="BinarizedLinear", out_channels=70, in_channels=150, members=9, repeats=2, bias=True),
    Case(operator="BinarizedLinear", out_channels=37, in_channels=70, members=3, repeats=18, bias=True),
    Case(
        operator="BinarizedConv2d",
        out_channels=70,
        in_channels=66,
        kernel_size=(2, 3),
        input_size=(5, 6),
        stride=(2, 1),
        padding=1,
        members=4,
        repeats=2,
        bias=True,
    ),
]
"""Sizes that are no multiple of a tile; of bits, few rows of a member and many."""
MODES = [
    ("float32", True),
    ("float16", False),
    *([("bfloat16", True), ("tfloat32", False)] if DEVICE == "cuda" else []),
]


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use larger tiles than on a GPU: the time of the interpreter hardly depends on the size of a tile."""
    if DEVICE == "cpu":
        large = dense_rng.FewRowsTiling(block_m=32, block_n=64, line=32, calls=16)
        many = dense_rng.ManyRowsTiling(block_k=128)
        monkeypatch.setattr(
            dense_rng, "default_tiling", lambda rows, **_: large if rows <= dense_rng.MAX_FEW_ROWS else many
        )
        monkeypatch.setattr(dense_rng, "CALLS", {False: 2048, True: 128})
        # Its kernel draws the same bits (test_binary.py), but takes long to be interpreted hundreds of times.
        monkeypatch.setattr(FusedBinary, "sample", lambda _, weight, stream: Binary().sample(weight, stream))


FIRST = {entry.variant.scheme: entry for entry in reversed(ENTRIES)}
"""One variant of each scheme."""


@pairs(EXACT[::2], ENTRIES)
def test_a_fused_variant_passes_the_oracle(entry: Entry, case: Case) -> None:
    """Forward, update, moments, purity, splits, antithetic halves and bias noise hold in float64."""
    verify(entry, case)


@pairs(EXACT[1::2], FIRST.values())
def test_a_fused_scheme_passes_the_oracle_on_images(entry: Entry, case: Case) -> None:
    """The same for convolutions."""
    verify(entry, case)


@pairs(LARGER, ENTRIES)
def test_a_fused_variant_errs_at_most_twice_the_slow_computation(entry: Entry, case: Case) -> None:
    """In narrow dtypes, of which variants take turns, on sizes that are no multiple of a tile."""
    if case.operator.startswith("Binarized"):  # bits have no antithetic halves
        modes = [("float32", False), ("float16", False)]
    else:
        modes = MODES if DEVICE == "cuda" else [MODES[ENTRIES.index(entry) % len(MODES)]]
    for dtype, antithetic in modes:
        verify(entry, msgspec.structs.replace(case, dtype=dtype, antithetic=antithetic))


def verify(entry: Entry, case: Case) -> None:
    """Compare a variant on a case with its reference implementation, unless it refuses the case."""
    try:
        built = build(entry.scheme, case, DEVICE, 0)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    built.verify()


def test_autocast_is_refused() -> None:
    """Rows of another type than the weight's are no operands; none is converted silently."""
    layer = nn.Linear(6, 5, device=DEVICE)
    population = perturb(layer, FusedHadamard(), members=2, sigma=0.1)
    noise, x = population.sample(0), torch.zeros(2, 6, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="does not support autocast"):
        population(x, noise)
    assert population(x, noise).shape == (2, 5)


DRAWING: dict[str, AnyScheme] = {
    str(scheme): scheme
    for scheme in (
        FusedRegenerated(),
        FusedRegeneratedSign(),
        FusedLowRank(2, regenerated=True),
        FusedLowRankSign(regenerated=True),
    )
}


@pytest.mark.parametrize("scheme", DRAWING.values(), ids=DRAWING)
def test_a_scheme_that_draws_needs_the_stream_philox(scheme: AnyScheme) -> None:
    """By default it has it, and stores nothing; other streams, and float64 for normals, are refused."""
    layer = nn.Linear(6, 5, bias=False, device=DEVICE)
    population = perturb(layer, scheme, members=4, sigma=0.1)
    assert (population.noise_bytes, population.shard_multiple) == (0, 1)
    with pytest.raises(ValueError, match="from the stream philox"):
        perturb(layer, scheme, members=4, sigma=0.1, stream="block")
    weight = torch.zeros(1, 5, 6)
    for name, make in STREAMS.items():
        stream = make(0, 0, "0.weight", range(2), device=torch.device("meta"), dtype=torch.float32)
        if name == "philox":
            assert scheme.sample(weight, stream).nbytes == 0
        else:
            with pytest.raises(ValueError, match="stream philox"):
                scheme.sample(weight, stream)
    if isinstance(scheme, FusedRegeneratedSign | FusedLowRankSign):
        perturb(layer.double(), scheme, members=4, sigma=0.1)
    else:
        with pytest.raises(ValueError, match="does not compute in float64"):
            perturb(layer.double(), scheme, members=4, sigma=0.1)


@pytest.mark.parametrize("scheme", DRAWING.values(), ids=DRAWING)
def test_a_part_of_a_population_has_the_rows_and_the_update_of_the_whole(scheme: AnyScheme) -> None:
    """Split at any member, rows see the same noise, and updates of the parts add up."""
    layer = nn.Linear(6, 5, bias=False, device=DEVICE)
    population = perturb(layer, scheme, members=7, sigma=0.1, seed=3)
    x, utilities = normal(0, 7, 6), torch.arange(7.0).sub(3).to(DEVICE)
    whole = population.sample(2)
    y = population(x, whole)
    population.update(whole, utilities)
    assert layer.weight.grad is not None
    expected, layer.weight.grad = layer.weight.grad, None
    for part in (range(2), range(2, 7)):
        noise, rows = population.sample(2, part), slice(part.start, part.stop)
        assert torch.allclose(population(x[rows], noise), y[rows], rtol=0, atol=1e-5)
        population.update(noise, utilities[rows])
    assert layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, expected, rtol=0, atol=1e-5)
