"""Each fused variant passes the checks for schemes and errs at most twice as much as plain torch."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import nn

from esbench.registry import REGISTRY, Entry, load
from esbench.schema import Case
from esbench.workload import UnavailableError, build
from impls import FusedBinary, FusedHadamard, FusedLowRankSign, FusedPermuted, FusedRegenerated
from impls.kernels import dense_rng, gemm, outer, permuted
from impls.kernels.autotune import TASKS, TUNABLES, relative_error, tolerance
from impls.kernels.tiling import Tiling
from impls.perturbation.noise import PhiloxStream
from impls.perturbation.population import perturb
from impls.schemes import Binary
from tests.kernels.launched.canaries import DEVICE
from tests.workload_cases import pairs

load("impls")

ENTRIES = REGISTRY.select(("Fused*",))
FIRST = list({entry.variant.scheme: entry for entry in reversed(ENTRIES)}.values())
"""One variant of each scheme."""
IMAGE = Case(
    operator="Conv2d",
    out_channels=5,
    in_channels=6,
    kernel_size=(1, 1),
    input_size=(1, 3),
    bias=True,
    members=8,
    dtype="float64",
)
ROWS = Case(operator="Linear", out_channels=5, in_channels=6, bias=True, members=8, dtype="float64")
PACKED_ROWS = msgspec.structs.replace(ROWS, operator="BinarizedLinear", in_channels=70)
PACKED_IMAGE = msgspec.structs.replace(
    IMAGE, operator="BinarizedConv2d", kernel_size=(1, 2), input_size=(1, 3), padding=(1, 0)
)
LARGER = [
    Case(operator="Linear", out_channels=40, in_channels=70, members=21, repeats=2, bias=True),
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
"""Sizes that are not multiples of a tile; for bits, with few and with many rows per member."""
IS_GPU = DEVICE == "cuda"
MODES = [
    ("float32", True),
    ("float16", False),
    *([("bfloat16", True), ("tfloat32", False)] if IS_GPU else []),
]


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use larger tiles than on a GPU: the interpreter's time hardly depends on the size of a tile."""
    if not IS_GPU:
        large = dense_rng.FewRowsTiling(block_m=32, block_n=64, line=32, calls=16)
        many = Tiling(block_n=64, block_k=128, num_stages=2)
        monkeypatch.setattr(
            dense_rng,
            "default_tiling",
            lambda rows, *_, **__: large if rows <= dense_rng.MAX_FEW_ROWS else many,
        )
        monkeypatch.setattr(dense_rng, "CALLS", {"normal": 2048, "uniform": 512, "sign": 128})
        monkeypatch.setattr(permuted, "GATHER_BLOCK", (128, 256))
        # FusedBinary's kernel draws the same bits (see test_binary.py), but is slow in the interpreter.
        monkeypatch.setattr(FusedBinary, "sample", lambda _, weight, stream: Binary().sample(weight, stream))


@pairs([IMAGE, PACKED_IMAGE, *([ROWS, PACKED_ROWS] if IS_GPU else [])], ENTRIES if IS_GPU else FIRST)
def test_a_fused_scheme_passes_all_checks(entry: Entry, case: Case) -> None:
    """A fused scheme passes all checks of forward, update and noise in float64.

    The interpreter runs one variant of each scheme, on images: variants draw the noise of the wrapped scheme,
    and their forward and update are compared below.
    """
    verify(entry, case)


@pairs(LARGER, ENTRIES)
def test_a_fused_variant_errs_at_most_twice_the_slow_computation(entry: Entry, case: Case) -> None:
    """In narrow dtypes the error is at most twice the reference's, on sizes not multiples of a tile.

    In the interpreter each variant that is not binarized runs in one of the modes, in turn.
    """
    if case.operator.startswith("Binarized"):  # bits have no antithetic halves
        modes = [("float32", False), ("float16", False)]
    else:
        modes = MODES if IS_GPU else [MODES[ENTRIES.index(entry) % len(MODES)]]
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
    """Under autocast a fused scheme raises an error instead of converting its operands silently."""
    layer = nn.Linear(6, 5, device=DEVICE)
    population = perturb(layer, FusedHadamard(), members=2, sigma=0.1)
    noise, x = population.sample(0), torch.zeros(2, 6, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="does not support autocast"):
        population(x, noise=noise)
    assert population(x, noise=noise).shape == (2, 5)


def test_a_scheme_that_draws_needs_the_stream_philox() -> None:
    """Schemes that draw in kernels store no noise and refuse other streams; normal noise refuses float64."""
    layer = nn.Linear(6, 5, bias=False, device=DEVICE)
    for scheme, is_normal in (
        (FusedRegenerated(), True),
        (FusedRegenerated("uniform"), False),
        (FusedLowRankSign(regenerated=True), False),
    ):
        population = perturb(layer.float(), scheme, members=4, sigma=0.1)
        assert (population.noise_bytes, population.shard_multiple) == (0, 1)
        with pytest.raises(ValueError, match="use stream='philox', not"):
            perturb(layer, scheme, members=4, sigma=0.1, stream="block")
        refused: Any = (
            pytest.raises(ValueError, match="not compute in float64") if is_normal else nullcontext()
        )
        with refused:
            perturb(layer.double(), scheme, members=4, sigma=0.1)


def test_a_shared_core_is_laid_out_as_its_kernel_reads_it() -> None:
    """Rows of a core begin at multiples of 16 bytes and have no gaps inside, also those of a convolution."""
    for shape in ((1, 5, 37), (1, 5, 37, 1, 1)):
        weight = torch.zeros(shape, dtype=torch.float16, device=DEVICE)
        stream = PhiloxStream(0, 1, "layer", range(3), weight.device, weight.dtype)
        core = FusedPermuted().sample(weight, stream).core
        assert core[0, 0].flatten(1).stride() == (40, 1)
        assert core.untyped_storage().nbytes() == 5 * 40 * core.itemsize


# --- Tile sizes. ---

SMALL = (48, 64, 32)
"""These replace the first three sizes of a task."""
TILES = [Tiling(block_m=16, block_n=32, block_k=16), Tiling(block_m=32, block_n=16, block_k=32, group_m=1)]


@pytest.mark.parametrize("kernel", sorted({task.kernel for task in TASKS}))
def test_a_tunable_launches_the_kernel_that_it_names(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tunable launches its kernel with the task's sizes, and its result does not depend on tile sizes."""
    for more in dict.fromkeys(task.sizes[3:] for task in TASKS if task.kernel == kernel):
        sizes = (*SMALL, *(min(size, 8) for size in more))
        launch = TUNABLES[kernel].launch(sizes, torch.float32, torch.device("cpu"))
        lookup = Mock(return_value=TILES[0])  # without given tile sizes a launch looks up tuned ones
        for module in (gemm, outer):
            monkeypatch.setattr(module, "find_tuned_tiling", lookup)
        result = launch(None).clone()
        ((name, _, *looked_up),) = {call.args for call in lookup.call_args_list}
        assert name == kernel
        assert tuple(looked_up) == sizes
        assert relative_error(launch(TILES[1]), result) <= tolerance(torch.float32)
        assert float(result.norm()) > 0
