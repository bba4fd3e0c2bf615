"""``python -m impls.kernels.compilation``: compile every kernel for GPUs that need not be there.

Exit codes: 0 done; 1 a specimen does not compile to what it should; 2 there is no triton here.
"""

import argparse
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import impls
from esbench import git
from esbench.studies.compiled_kernels import (
    FILE,
    SCHEMA,
    Compilation,
    Compilations,
    Refused,
    write_compilations,
)

if TYPE_CHECKING:
    from impls.kernels.inspection.specimen import Specimen

KINDS: Mapping[str, tuple[str, ...]] = {
    "matrix": ("wgmma.mma_async", "mma.sync"),
    "popcount": ("popc",),
    "fused multiply-add": ("fma",),
    "wide multiply": ("mul.wide", "mul.hi", "mad.wide", "mad.hi"),
    "global load": ("ld.global",),
    "copy ahead": ("cp.async.cg", "cp.async.ca", "cp.async.bulk.tensor"),
    "global store": ("st.global",),
    "shared load": ("ld.shared", "ldmatrix"),
    "shared store": ("st.shared", "stmatrix"),
    "atomic": ("atom", "red"),
    "barrier": ("bar.", "barrier"),
}
"""Kinds of instructions -> what their names start with in assembly."""


def look(specimens: Sequence["Specimen"], capabilities: Sequence[int]) -> tuple[Compilations, list[str]]:
    """Compile specimens for each capability; what does not compile is kept with its reason.

    Returns:
        What came out, and what is wrong with it.

    """
    import triton  # noqa: PLC0415  which need not be there

    from impls.kernels.inspection.specimen import inspect, problems  # noqa: PLC0415  it loads triton

    wrong: list[str] = []

    found: list[Compilation] = []
    refused: list[Refused] = []
    for specimen in specimens:
        for capability in capabilities:
            kind = {"title": specimen.title, "kernel": specimen.kernel.__name__, "capability": capability}
            try:
                one = inspect(specimen, capability)
            except Exception as error:  # noqa: BLE001  whatever the compiler or the assembler raises is the reason
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                refused.append(Refused(**kind, reason=reason))
                wrong.append(f"{specimen.title} does not compile for {capability}: {reason}")
                continue
            found_wrong = problems(specimen, capability, one)
            wrong += (f"{specimen.title} for {capability} {problem}" for problem in found_wrong)
            counts = {name: one.count(*starts) for name, starts in KINDS.items()}
            found.append(
                Compilation(
                    **kind,
                    warps=specimen.warps,
                    stages=specimen.stages,
                    registers=one.registers,
                    shared_bytes=one.shared_bytes,
                    spilled_bytes=one.spilled_bytes,
                    instructions={**counts, "all": one.instructions},
                )
            )
    package = Path(impls.__file__).parent
    compilations = Compilations(
        schema=SCHEMA,
        triton=triton.__version__,
        commit=git.commit(package),
        dirty=git.is_dirty(package),
        found=tuple(found),
        refused=tuple(refused),
    )
    return compilations, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, write the file, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m impls.kernels.compilation",
        description="Compile every kernel for GPUs that need not be there: registers, memory, instructions.",
    )
    parser.add_argument("--out", type=Path, default=Path("results") / FILE, help="file to write")
    parser.add_argument(
        "--capability",
        type=int,
        action="append",
        help="90 for 9.0; repeatable; by default all that are known",
    )
    parser.add_argument("--kernels", default="*", help="glob over titles, such as 'low rank*'")
    asked = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        sys.stderr.write("kernels: triton, which is for Linux only, is not installed here\n")
        return 2
    from impls.kernels.inspection import SPECIMENS  # noqa: PLC0415  it loads triton
    from impls.kernels.inspection.specimen import MOST_SHARED_BYTES  # noqa: PLC0415  the same

    specimens = [one for one in SPECIMENS if fnmatchcase(one.title, asked.kernels)]
    compilations, wrong = look(specimens, asked.capability or sorted(MOST_SHARED_BYTES))
    write_compilations(compilations, asked.out)
    for problem in wrong:
        sys.stderr.write(f"kernels: {problem}\n")
    sys.stderr.write(f"kernels: {len(compilations.found)} compiled, written to {asked.out}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
