"""A kernel compiled for a GPU that is not there, and what the assembler says of it."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARPS = 4
"""What a launch has unless it asks for other ones."""

TYPES = {
    "out": "*i32",
    "x": "*i32",
    "weights": "*i32",
    "words": "*i32",
    "planes": "*i32",
    "thresholds": "*fp32",
    "x_stride": "i64",
    "weight_stride": "i64",
}
"""Types of arguments, by name; others are i32."""


class Compiled(NamedTuple):
    """What came out.

    Attributes:
        ptx: the assembly.
        registers: of a thread.
        shared_bytes: of a program.
        spilled_bytes: what registers had no room for.

    """

    ptx: str
    registers: int
    shared_bytes: int
    spilled_bytes: int

    def count(self, instruction: str) -> int:
        """Count an instruction, given as the start of its name."""
        return len(re.findall(rf"^\s*(?:@\S+\s+)?{re.escape(instruction)}", self.ptx, re.MULTILINE))


def compiled(
    kernel: Any,
    capability: int,
    constants: Mapping[str, object],
    folder: Path,
    warps: int = WARPS,
    **types: str,
) -> Compiled:
    """Compile a kernel as a launch with aligned pointers, strides and widths would.

    Args:
        kernel: the decorated function.
        capability: of the GPU, 90 for 9.0.
        constants: arguments that are compiled in: constexpr, and what a launch finds to be 1.
        folder: for the assembler.
        warps: of a program.
        **types: of arguments that are not as in TYPES.

    """
    names = kernel.arg_names
    known = {**TYPES, **types}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name][0] == "*" or name.endswith(("stride", "width"))]
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants
    }
    source = ASTSource(kernel, signature, constexprs=dict(constants), attrs=attributes)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    ptx: str = built.asm["ptx"]
    path = folder / "kernel.ptx"
    path.write_text(ptx)
    target = re.search(r"^\.target (\S+?),?$", ptx, re.MULTILINE)
    assert target
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name", target[1], str(path), "-o", "/dev/null"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    assert registers
    spilled = sum(int(size) for size in re.findall(r"(\d+) bytes (?:spill|stack)", said))
    return Compiled(ptx, int(registers[1]), built.metadata.shared, spilled)
