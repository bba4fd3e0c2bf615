"""Tests on a CUDA GPU of memory, launches, peak rates, TF32 and the largest population that fits."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from esbench.measure.device_peaks import device_peaks
from esbench.measure.float32_precision import has_tf32, precision
from esbench.measure.max_population import find_largest, fit_test
from esbench.measure.memory import footprint
from esbench.measure.profiler import profile, trace
from esbench.measure.timers import clocks
from esbench.registry import REGISTRY, Entry, load
from esbench.schema import Case
from esbench.workload import build
from tests.workload_cases import NUMBERS

load("impls")

pytestmark = pytest.mark.alone

MIB = 1024**2
CASE = Case(operator="Linear", out_channels=96, in_channels=64, members=300)


def empty(size: int) -> torch.Tensor:
    """Allocate this number of bytes on the GPU."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def test_the_memory_of_a_call_is_counted() -> None:
    """The peak memory of a call is exact, up to the allocator's 512-byte steps, and the same in 20 repeats.

    Memory that each call adds and never frees is reported as kept; replacing a buffer by an equal one is not.
    """
    footprints = [footprint(lambda: empty(3 * MIB + 1), "cuda", lambda: 7) for _ in range(20)]
    assert {repeat.peak_bytes for repeat in footprints} == {3 * MIB + 512}
    assert {repeat.kept_bytes for repeat in footprints} == {0}
    assert all((repeat.reserved_bytes or 0) >= repeat.peak_bytes for repeat in footprints)
    assert {repeat.process_bytes for repeat in footprints} == {7}
    assert footprint(lambda: empty(1), "cuda").process_bytes is None

    def call() -> torch.Tensor:
        first, second = empty(4 * MIB), empty(2 * MIB)
        del first
        return second

    assert footprint(call, "cuda").peak_bytes == 6 * MIB
    hoard: list[torch.Tensor] = []
    assert footprint(lambda: hoard.append(empty(MIB)), "cuda")[:2] == (MIB, MIB)
    ring = [empty(0)]
    assert footprint(lambda: ring.__setitem__(0, empty(MIB)), "cuda")[:2] == (MIB, 0)


@pytest.mark.parametrize("entry", NUMBERS, ids=lambda entry: entry.variant.name)
def test_no_variant_hoards_or_works_on_another_stream(entry: Entry) -> None:
    """In each phase a variant keeps no memory, repeats its peak and launches, and uses only one stream.

    Only a sample of noise that is not stored, but drawn in the forward, launches nothing.
    """
    workload = build(entry.scheme, CASE, "cuda", 0)
    for phase, call in workload.phases.items():
        workload.enter(phase)
        call()
        first, second = footprint(call, "cuda"), footprint(call, "cuda")
        assert first.kept_bytes == second.kept_bytes == 0
        assert first.peak_bytes == second.peak_bytes
        traced = trace(call, "cuda")
        assert traced == trace(call, "cuda")
        assert traced.launches > 0 or (phase == "sample" and not workload.noise_bytes)
        assert traced.other_streams == ()


def test_launches_waits_and_streams_are_seen() -> None:
    """A trace counts kernels, fills and copies on the current stream, and reports waits and other streams."""
    a, b = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    def call() -> None:
        a.add_(1)
        b.zero_()
        a.copy_(b)

    def on_two_streams() -> None:
        a.add(1)
        with torch.cuda.stream(side):
            b.mul(2)

    assert trace(call, "cuda") == (3, (), ())
    with torch.cuda.stream(torch.cuda.Stream()):
        assert trace(call, "cuda") == (3, (), ())
    assert trace(lambda: None, "cuda") == (0, (), ())
    waiting: tuple[Callable[[], object], ...] = (torch.cuda.synchronize, a[0].item)
    for wait in waiting:
        assert trace(wait, "cuda").waits != ()
    traced = trace(on_two_streams, "cuda")
    assert traced.launches == 2
    assert len(traced.other_streams) == 1


def test_a_profile_names_kernels(tmp_path: Path) -> None:
    """A profile counts every launch, and its trace file and table name the kernels."""
    a, path = torch.randn(512, 512, device="cuda"), tmp_path / "gpu.json"
    profiled = profile(lambda: torch.relu(a @ a), "cuda", path)
    assert profiled.trace.launches >= 2
    kernels = {
        span["name"] for span in json.loads(path.read_text())["traceEvents"] if span.get("cat") == "kernel"
    }
    assert len(kernels) >= 2
    assert "aten::relu" in profiled.table


def test_ceilings_of_the_gpu() -> None:
    """Each dtype has a measured peak rate; bfloat16, and TF32 where available, are faster than float32."""
    (clock,) = clocks("cuda", ("eager",))
    peaks = list(device_peaks("cuda", ["float32", "tfloat32", "bfloat16"], clock))
    rates = {peak.dtype: peak.amount / min(peak.samples) for peak in peaks}
    assert rates["uint8"] > 10
    assert rates["bfloat16"] > rates["float32"] > 0
    if has_tf32("cuda"):
        assert rates["tfloat32"] > 1.5 * rates["float32"]


def test_tf32_is_what_precision_says() -> None:
    """The error of a product in float32 is less than a tenth of its error in TF32."""
    if not has_tf32("cuda"):
        pytest.skip("this GPU has no TF32")
    a, b = (torch.randn(512, 512, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    errors = {}
    for dtype in ("float32", "tfloat32"):
        with precision(dtype):
            errors[dtype] = ((a @ b).double() - exact).abs().max().item()
    assert errors["tfloat32"] > 10 * errors["float32"]


@pytest.fixture
def _one_gibibyte() -> Iterator[None]:
    """Let torch's allocator take one more GiB of GPU memory and no more."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1024 * MIB) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("_one_gibibyte")
def test_the_capacity_of_the_gpu_is_what_its_memory_allows() -> None:
    """With 1 GiB of memory and 256 KiB of noise per member, at least 1024 but fewer than 4096 members fit."""
    (perturbed,) = REGISTRY.select(["Perturbed"])
    case = Case(operator="Linear", out_channels=256, in_channels=256)
    (clock,) = clocks("cuda", ("eager",))
    fits = fit_test(perturbed, case, "forward", "cuda", 0)
    largest = find_largest(fits, 2**16, 300.0, clock.seconds)
    assert largest.stop == "resolution"
    assert 1024 <= largest.members < 4096
    assert fits(largest.members)
    assert not fits(2 * largest.too_many)
