"""Suite ``peers``: generations of esbench, of other libraries and of plain torch, in the same rounds."""

import msgspec

from esbench.registry import Suite, suite
from esbench.schema import QUALITY, Case
from impls.benchmark.peers import evosax, evotorch, evox, populations, torch_func, torcheggroll
from impls.benchmark.peers.workload import LEARNED, OPERATOR

__all__ = ["CHECKS", "evosax", "evotorch", "evox", "populations", "torch_func", "torcheggroll"]


def case(population: int, width: int = 64, rows: int = 32) -> Case:
    """Return a case of ``population`` evaluations of a network with ``width`` hidden units."""
    return msgspec.structs.replace(LEARNED, out_channels=width, members=population // 2, repeats=2 * rows)


CHECKS = (
    msgspec.structs.replace(LEARNED, out_channels=6, in_channels=5, members=32, repeats=6, dtype="float64"),
)
"""For the suite ``check``."""

suite(
    Suite(
        name="peers",
        description="a generation by esbench, other libraries and plain torch, see docs/peers.md",
        variants=(f"*{OPERATOR}*", "LoopOverMembers", "Backpropagation"),
        cases=(
            *(case(population) for population in (64, 256, 2048, 16384)),
            case(2048, rows=1),
            case(2048, width=256),
            case(256, width=1024),
        ),
        phases=("forward", "step", QUALITY),
        cell_s=0.2,
        active=(),
        limit_s=600.0,
    )
)
