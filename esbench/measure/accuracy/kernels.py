"""What the study times: calls from 2 us to 50 ms, and waits of a known length."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter_ns as _host_ns

import torch
from torch.nn import functional

from esbench.measure.timers import Call
from esbench.registry import REGISTRY, UnavailableError, build

LENGTHS_NS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
"""The waits of known length."""
SPINS_NS = (20_000, 100_000, 1_000_000, 10_000_000)
"""The spins among the kernels on CUDA: they move no memory, so that the state of a cache is no matter."""
_CALIBRATION = 20_000_000


@dataclass(frozen=True)
class Kernel:
    """A call with a name; ``expected_ns`` is how long it takes, where that is known."""

    name: str
    call: Call
    expected_ns: float | None = None


def kernels(device: str, seed: int) -> list[Kernel]:
    """Return the calls that are timed on a device, from short to long."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = partial(torch.randn, generator=generator, device=device)
    if device == "cuda":
        return [
            *map(_spin, SPINS_NS),
            *_adds(normal, (20, 24, 26, 28)),
            *_products(normal, (1024, 2048, 4096, 8192)),
        ]
    return [
        *_adds(normal, (14,)),
        Kernel("clone 2^16", normal(1 << 16).clone),
        *_products(normal, (64, 128)),
        *_adds(normal, (20,)),
        Kernel("softmax 512 x 1024", partial(torch.softmax, normal(512, 1024), 1)),
        *_products(normal, (256,)),
        Kernel("exp 2^20", normal(1 << 20).exp),
        Kernel("linear 1024 x 256 x 256", partial(functional.linear, normal(1024, 256), normal(256, 256))),
        *_products(normal, (512,)),
        Kernel("clone 2^22", normal(1 << 22).clone),
        *_products(normal, (1024, 1664)),
    ]


def scheme(device: str, seed: int) -> list[Kernel]:
    """Return the forward of the first variant of the suite quick on its first case, if one is registered."""
    suite = REGISTRY.suites.get("quick")
    batched = (entry for entry in REGISTRY.entries.values() if entry.variant.mode == "batched")
    for case in suite.cases if suite else ():
        for entry in batched:
            if not entry.supports(case):
                continue
            try:
                workload = build(entry.scheme, case, device, seed)
            except UnavailableError:
                continue
            workload.enter("forward")
            return [Kernel(f"{entry.variant.label(case.operator)}{case.shape}", workload.phases["forward"])]
    return []


def waits(device: str) -> list[Kernel]:
    """Return waits of known length: the device spins on CUDA, the host elsewhere."""
    return [(_spin if device == "cuda" else _busy)(ns) for ns in LENGTHS_NS]


def _busy(wait_ns: int) -> Kernel:
    """A wait of the host, by the clock that the harness reads too: what it reads more is its own."""

    def wait() -> None:
        end = _host_ns() + wait_ns
        while _host_ns() < end:
            pass

    return Kernel(f"busy wait {wait_ns // 1000} us", wait, float(wait_ns))


def _spin(wait_ns: int) -> Kernel:
    """A kernel that spins for so many cycles: twice as many take twice as long."""
    cycles = round(wait_ns * _cycles_per_ns())
    return Kernel(f"spin {wait_ns // 1000} us", partial(torch.cuda._sleep, cycles), float(wait_ns))  # noqa: SLF001  # torch has no public kernel of known length


@cache
def _cycles_per_ns() -> float:
    """About how many cycles the device does in a nanosecond: it sets the scale, nothing is judged by it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first wakes the device up
        start.record()
        torch.cuda._sleep(_CALIBRATION)  # noqa: SLF001  # torch has no public kernel of known length
        end.record()
        torch.cuda.synchronize()
    return _CALIBRATION / (start.elapsed_time(end) * 1e6)


def _adds(normal: Callable[..., torch.Tensor], powers: tuple[int, ...]) -> list[Kernel]:
    return [
        Kernel(f"add 2^{power}", partial(torch.add, normal(1 << power), normal(1 << power)))
        for power in powers
    ]


def _products(normal: Callable[..., torch.Tensor], sizes: tuple[int, ...]) -> list[Kernel]:
    return [
        Kernel(f"matmul {size}", partial(torch.mm, normal(size, size), normal(size, size))) for size in sizes
    ]
