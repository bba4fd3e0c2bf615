"""Suite ``peers``: generations of esbench, of other libraries and of plain torch, in the same rounds."""

import msgspec

from esbench.registry import Suite, suite
from esbench.schema import QUALITY, Case
from impls.benchmark.peers import evosax, evotorch, evox, populations, torch_func, torcheggroll
from impls.benchmark.peers.networks import CNN, MLP, OPERATORS, TRANSFORMER
from impls.benchmark.peers.workload import LEARNED

__all__ = ["CHECKS", "evosax", "evotorch", "evox", "populations", "torch_func", "torcheggroll"]


def case(population: int, width: int = 64, rows: int = 32, operator: str = MLP) -> Case:
    """Return a case of ``population`` evaluations of a network of ``width`` hidden units or channels."""
    return msgspec.structs.replace(
        LEARNED, operator=operator, out_channels=width, members=population // 2, repeats=2 * rows
    )


CHECKS = tuple(
    msgspec.structs.replace(case(64, 4, 3, operator), in_channels=16, dtype="float64", sigma=1e-3)
    for operator in OPERATORS
)
"""For the suite ``check``; a norm of four channels is too far from linear for larger noise."""

suite(
    Suite(
        name="peers",
        description="a generation by esbench, other libraries and plain torch, see docs/peers.md",
        variants=(*(f"*{operator}*" for operator in OPERATORS), "LoopOverMembers", "Backpropagation"),
        cases=(
            *(case(population) for population in (64, 256, 2048, 16384)),
            case(2048, rows=1),
            case(2048, width=256),
            case(256, width=1024),
            *(case(population, 8, operator=CNN) for population in (256, 2048)),
            case(256, 32, operator=TRANSFORMER),
        ),
        phases=("forward", "step", QUALITY),
        cell_s=0.2,
        active=(),
        limit_s=600.0,
    )
)
