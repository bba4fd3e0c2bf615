"""Suites of layers: which variants are measured on which cases."""

from typing import Any

from esbench.registry import Suite, suite
from esbench.schema import PHASES, QUALITY, Case
from impls.benchmark.peers import suite as peers
from impls.benchmark.training import backward, memory_reclaim, rigl, shared_compile

NESGPU_LINEAR = ((256, 256), (512, 512), (1024, 1024))
NESGPU_CONV2D = (
    (16, 16, (3, 3), (64, 64)),
    (32, 32, (3, 3), (64, 64)),
    (64, 64, (3, 3), (32, 32)),
    (32, 32, (1, 1), (32, 32)),
    (1024, 1024, (1, 1), (1, 1)),
)
"""Columns of NESgpu's tables: (out, in) and (out, in, kernel, input size), without padding."""

PLAIN = ("*", "!Fused*", "!Compiled*", "!Addmm*")
"""Schemes in plain torch, and the baselines; kernels and what they are compared with have their own suite."""

QUICK = (
    *PLAIN,
    *("!Perturbed(stored=weights)", "!SparsePerturbed(k=2*", "!LowRank(rank=4)", "!LowRankSign(regenerated*"),
    *("!Permuted(side=*", "!Permuted(in_sparsity=0.5)", "!Flipped(side=out)", "!Flipped(cores=32)"),
    *("!DropoutMask(side=out)", "!LowRank*values=uniform)"),
)
"""One variant of each scheme, or a few: two minutes in all."""

README = (
    "Perturbed",
    *("SparsePerturbed(k=1)", "SparsePerturbed(k=2)"),
    *("LowRank(rank=1)", "LowRankSign", "Orthogonal"),
    *("Permuted", "Permuted(in_sparsity=0.5)", "Permuted(in_sparsity=0.1)", "Permuted(side=out*)"),
    *("Flipped", "Flipped(side=both)", "Hadamard", "DropoutMask"),
    *("Base", "Naive"),
)
"""Variants of the README's tables: NESgpu's schemes and one of each other family; some minutes in all."""


GATED = ("*Linear | *", "*Linear(k=1) | *", "*Linear(rank=1) | *")
"""Cells of linear layers with one variant of each scheme: what `esbench gate` times, 60 cells in a suite.

Where a scheme has a variant with all default options, it is that one.
"""

CHECKED: dict[str, Any] = {"bias": True, "members": 8, "dtype": "float64"}
"""Fields of the cases on which every variant is checked."""


def linear(out: int, inp: int, **options: Any) -> Case:  # noqa: ANN401  fields of a case
    """Return a case of a linear layer, by default with 1024 members."""
    return Case(**{"operator": "Linear", "out_channels": out, "in_channels": inp, **options})


def conv2d(
    out: int,
    inp: int,
    kernel_size: tuple[int, int],
    input_size: tuple[int, int],
    **options: Any,  # noqa: ANN401  fields of a case
) -> Case:
    """Return a case of a convolution, by default with 1024 members."""
    return linear(
        out, inp, **{"operator": "Conv2d", "kernel_size": kernel_size, "input_size": input_size, **options}
    )


SUITES = (
    Suite(
        name="readme",
        description="NESgpu's tables: three Linear and five Conv2d shapes, 1024 members; 5 min on an H200",
        variants=README,
        cases=(*(linear(*shape) for shape in NESGPU_LINEAR), *(conv2d(*shape) for shape in NESGPU_CONV2D)),
        cell_s=1.0,
        active=("Linear(1024, 1024)*",),
        active_variants=("Base", "Perturbed", "SparsePerturbed(k=1)", "LowRank(rank=1)"),
        # A graph cannot capture the generators of the stream ``block``.
        methods={"sample": ("eager",), "forward": ("graph",), "update": ("graph",), "step": ("eager",)},
        traced=("step",),
        limit_s=300.0,
    ),
    Suite(
        name="quick",
        description="three small shapes; two minutes on two CPU cores",
        variants=QUICK,
        cases=(
            linear(128, 128, members=256),
            linear(256, 256, members=64),
            conv2d(16, 16, (3, 3), (16, 16), members=256),
        ),
        phases=(*PHASES, QUALITY),
        cell_s=0.05,
    ),
    Suite(
        name="population",
        description="forward against the population: Linear(256, 256), 64 to 65536 members",
        variants=PLAIN,
        cases=tuple(linear(256, 256, members=2**power) for power in range(6, 17)),
        phases=("forward",),
        cell_s=0.2,
        sweep="members",
        stop_s=4.0,
        active=(),
    ),
    Suite(
        name="width",
        description="forward against the width: square Linear layers of 64 to 8192 channels, 256 members",
        variants=PLAIN,
        cases=tuple(linear(2**power, 2**power, members=256) for power in range(6, 14)),
        phases=("forward",),
        cell_s=0.2,
        sweep="out_channels",
        stop_s=10.0,
        active=(),
    ),
    Suite(
        name="capacity",
        description="a population whose dense noise is 1.1 TB: Linear(4096, 4096), 16384 members, for a GPU",
        cases=(linear(4096, 4096, members=2**14),),
        # Without Loop, which always fits but takes minutes per call.
        variants=("Perturbed*", "SparsePerturbed*", "Permuted*", "Flipped*", "Vmap", "Base", "Naive"),
        phases=("forward",),
        cell_s=0.5,
        active=(),
    ),
    Suite(
        name="digits",
        description="three small networks of handwritten digits: how close a step is to the gradient",
        variants=PLAIN,
        cases=(
            linear(10, 64, operator="DigitsMLP", members=512),
            linear(10, 1, operator="DigitsCNN", input_size=(8, 8), members=512),
            linear(10, 1, operator="DigitsResNet", input_size=(8, 8), members=128, sigma=0.05),
        ),
        phases=(*PHASES, QUALITY),
        cell_s=0.3,
        active=(),
        limit_s=300.0,
    ),
    Suite(
        name="quality",
        description="effective members against members, 64 to 65536: Linear(64, 64) and a small Conv2d",
        variants=PLAIN,
        cases=(
            *(linear(64, 64, members=2**power) for power in range(6, 17, 2)),
            *(conv2d(8, 8, (3, 3), (8, 8), members=2**power) for power in range(6, 17, 2)),
        ),
        phases=("sample", "step", QUALITY),
        cell_s=0.2,
        sweep="members",
        stop_s=4.0,
        active=(),
        limit_s=300.0,
    ),
    Suite(
        name="binary",
        description="binarized layers: three BinarizedLinear and two BinarizedConv2d shapes",
        cases=(
            *(linear(*shape, operator="BinarizedLinear") for shape in NESGPU_LINEAR),
            conv2d(64, 64, (3, 3), (16, 16), operator="BinarizedConv2d", members=256),
            conv2d(128, 128, (3, 3), (8, 8), operator="BinarizedConv2d", members=256),
        ),
        variants=("Binary*", "Base", "Naive"),
        phases=(*PHASES, QUALITY),
        cell_s=0.5,
        limit_s=300.0,
    ),
    Suite(
        name="gate",
        description="what `esbench gate` compares on a CPU: three small shapes, 64 members",
        variants=PLAIN,
        cases=(
            linear(64, 64, members=64),
            conv2d(8, 8, (3, 3), (8, 8), members=64),
            linear(64, 64, operator="BinarizedLinear", members=64),
        ),
        phases=("sample", "forward", "update"),
        cell_s=0.12,
        timed=(*GATED, "PerturbedConv2d | *", "LowRankConv2d(rank=1) | *", "PermutedConv2d | *"),
    ),
    Suite(
        name="gate_cuda",
        description="what `esbench gate` compares on a GPU: Linear(1024, 1024) and a Conv2d, 1024 members",
        variants=("*", "!Compiled*", "!Addmm*"),  # a gate starts many processes, each of which would compile
        cases=(linear(1024, 1024), conv2d(64, 64, (3, 3), (32, 32), members=256)),
        phases=("sample", "forward", "update"),
        cell_s=0.6,
        timed=tuple(
            f"{glob}{phase} | graph"
            for glob in (*GATED, "*PerturbedConv2d | *")
            for phase in ("forward", "update")
        ),
    ),
    Suite(
        name="kernels",
        description="fused kernels and the schemes that they compute, for a GPU",
        variants=(
            "Fused*",
            *("LowRank*", "AddmmLowRank*", "Hadamard", "SparsePerturbed*", "Permuted*", "Flipped*"),
            *("Dropout*", "Regenerated*", "Binary*", "Base", "Naive"),
        ),
        cases=(
            conv2d(32, 32, (1, 1), (32, 32), dtype="bfloat16"),
            linear(1024, 1024, dtype="bfloat16"),
            linear(1024, 1024, dtype="bfloat16", members=8192),
            linear(8192, 8192, dtype="bfloat16"),
            linear(1024, 1024, operator="BinarizedLinear"),
        ),
        cell_s=0.5,
        # Sorted by width: on a CPU most variants stop before the last case, where a call takes seconds.
        sweep="out_channels",
        stop_s=120.0,
        active=(),
        limit_s=300.0,
    ),
    Suite(
        name="unstored",
        description="a population whose dense noise is 2 TB, drawn in kernels: Linear(1024, 1024), for a GPU",
        variants=("FusedRegenerated*", "FusedLowRank*regenerated*", "Base"),
        cases=(linear(1024, 1024, dtype="bfloat16", members=2**20),),
        phases=("forward", "update"),
        cell_s=10.0,
        active=(),
    ),
    Suite(
        name="check",
        description="small float64 cases on which every variant is checked",
        cases=(
            linear(5, 6, **CHECKED),
            conv2d(4, 6, (3, 2), (7, 6), stride=(2, 1), dilation=(1, 2), padding=(1, 2), groups=2, **CHECKED),
            conv2d(3, 4, (3, 3), (5, 4), padding="same", padding_mode="circular", **CHECKED),
            linear(5, 70, operator="BinarizedLinear", **CHECKED),
            conv2d(
                4, 6, (3, 2), (7, 6), operator="BinarizedConv2d", stride=(2, 1), padding=(1, 2), **CHECKED
            ),
            *backward.CHECKS,
            *rigl.CHECKS,
            *memory_reclaim.CHECKS,
            *shared_compile.CHECKS,
            *peers.CHECKS,
        ),
    ),
)

for layer_suite in SUITES:
    suite(layer_suite)
