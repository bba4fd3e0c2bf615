"""A kernel compiled for a GPU that is not there, and what the assembler says of it."""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from impls.kernels.autotune import resource_usage

ALIGNED = 16
"""What pointers, strides and sizes are multiples of, in the launches that are looked at."""

MOST_SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""Of a program, by capability."""

MOST_SPILLED_BYTES = 16
"""Of a thread: triton 3.6 moves up to four registers to memory where triton 3.7 moves none."""

MATRIX = {80: ("mma.sync",), 90: ("wgmma.mma_async",)}
"""What a product of matrices is made of, by capability."""


class Specimen(NamedTuple):
    """A kernel as a launch would compile it.

    Attributes:
        kernel: the decorated function.
        title: what it computes and in which type, unique.
        types: of arguments, by name, as Triton has them (``*bf16``, ``fp32``, ``i64``); others are i32.
        constants: arguments that are compiled in: constexpr, and what a launch finds to be 1.
        instructions: starts of their names, which must be there, by capability.
        warps: of a program.
        stages: loads that are under way at once.
        odd: arguments that need not be multiples of 16, by name.

    """

    kernel: Any
    title: str
    types: Mapping[str, str]
    constants: Mapping[str, object]
    instructions: Mapping[int, tuple[str, ...]]
    warps: int = 4
    stages: int = 3
    odd: Collection[str] = ()


class Inspection(NamedTuple):
    """What came out.

    Attributes:
        ptx: the assembly.
        registers: of a thread.
        shared_bytes: of a program.
        spilled_bytes: of a thread's stack, which has what registers had no room for.

    """

    ptx: str
    registers: int
    shared_bytes: int
    spilled_bytes: int

    def count(self, *instructions: str) -> int:
        """Count instructions, given as the starts of their names."""
        starts = "|".join(map(re.escape, instructions))
        return len(re.findall(rf"^\s*(?:@\S+\s+)?(?:{starts})", self.ptx, re.MULTILINE))

    @property
    def instructions(self) -> int:
        """How many there are in all, each where it stands: loops are not run."""
        return len(re.findall(r"^\s*(?:@\S+\s+)?[a-z][\w.:]*(?:\s[^;]*)?;", self.ptx, re.MULTILINE))


def inspect(specimen: Specimen, capability: int) -> Inspection:
    """Compile a specimen for a GPU of this capability, 90 for 9.0.

    Pointers, and whole numbers that are neither constants nor ``odd`` nor such that the kernel asks a launch
    not to look at them, are taken for multiples of 16, as in launches that are worth a look.

    Raises:
        triton.TritonError: it does not compile.

    """
    kernel, constants = specimen.kernel, dict(specimen.constants)
    names = kernel.arg_names
    known = dict.fromkeys(constants, "constexpr") | dict(specimen.types)
    signature = {name: known.get(name, "i32") for name in names}
    overlooked = {*specimen.odd, *(one.name for one in kernel.params if one.do_not_specialize)}
    attributes = {
        (place,): [["tt.divisibility", ALIGNED]]
        for place, name in enumerate(names)
        if signature[name] != "constexpr" and not signature[name].startswith("fp") and name not in overlooked
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": specimen.warps, "num_stages": specimen.stages}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack_bytes = resource_usage(built.asm["cubin"])
    return Inspection(built.asm["ptx"], registers, built.metadata.shared, stack_bytes)


def problems(specimen: Specimen, capability: int, found: Inspection) -> list[str]:
    """Return what is wrong with the code of a specimen: instructions that are missing, spills, too large."""
    wrong = [f"has no {name}" for name in specimen.instructions[capability] if not found.count(name)]
    if found.spilled_bytes > MOST_SPILLED_BYTES:
        wrong.append(f"spills {found.spilled_bytes} bytes")
    if found.shared_bytes > MOST_SHARED_BYTES[capability]:
        wrong.append(f"needs {found.shared_bytes} bytes of shared memory")
    return wrong
