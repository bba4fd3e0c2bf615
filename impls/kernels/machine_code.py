"""Machine code of a compiled kernel: its loops, and what a warp executes in and around them."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from esbench.compiled import NOTHING, Code, Executed
from impls.kernels.optional_triton import triton

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_PREDICATE = re.compile(r"^!?U?P\d")
_TENSOR_SHAPE = re.compile(r"(?:(\d+)x(\d+)x(\d+)|\.(16)(8)(8|16|32))")
DESCRIPTOR_LOAD = "UTMALDG"
"""The instruction that loads a tile by a descriptor."""
WAIT_INSTRUCTIONS = 10
"""A loop with fewer instructions only waits at a barrier, and is counted as if it never repeats."""


class Instruction(NamedTuple):
    """An instruction of a warp.

    Attributes:
        address: in bytes.
        is_conditional: whether a predicate decides if it is executed.
        opcode: with its modifiers, such as ``HGMMA.64x256x16.F32.BF16``.
        operands: text.
    """

    address: int
    is_conditional: bool
    opcode: str
    operands: str

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def ends_block(self) -> bool:
        """Whether the next instruction may not be executed after this one."""
        return self.name in {"BRA", "EXIT", "RET"} and ".DIV" not in self.opcode

    @property
    def targets(self) -> tuple[int, ...]:
        """The address that a branch goes to."""
        target = _TARGET.search(self.operands) if self.name == "BRA" and self.ends_block else None
        return (int(target[1], 16),) if target else ()

    @property
    def tensor_flops(self) -> int:
        """Flops of tensor cores for a warp at the rate of bfloat16; an operation on int8 counts half."""
        if self.name not in {"HGMMA", "HMMA", "IGMMA", "IMMA"}:
            return 0
        shape = _TENSOR_SHAPE.search(self.opcode)
        assert shape is not None, self.opcode  # noqa: S101  every such instruction names its shape
        rows, columns, depth = (int(size) for size in shape.groups() if size)
        warps = 4 if "GMMA" in self.name else 1  # that execute it together
        flops = 2 * rows * columns * depth // warps
        if self.name.startswith("I"):
            return flops // 2
        return 2 * flops if ".TF32" in self.opcode else flops


def run_cuobjdump(cubin: bytes, option: str) -> str:
    """Return what ``cuobjdump`` prints about a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  triton's own


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the stack bytes, which are spilled registers, of a thread."""
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", run_cuobjdump(cubin, "--dump-resource-usage")))
    return int(numbers["REG"]), int(numbers["STACK"])


def code_of(cubin: bytes, ttir: str) -> Code:
    """Return what a warp of a kernel executes.

    Args:
        cubin: the compiled kernel.
        ttir: Triton's first intermediate code, which has each load of a descriptor once.
    """
    instructions = parse(run_cuobjdump(cubin, "--dump-sass"))
    is_described = any(instruction.name == DESCRIPTOR_LOAD for instruction in instructions)
    return ControlFlow(instructions).code(ttir.count("tt.descriptor_load") if is_described else 0)


def parse(text: str) -> list[Instruction]:
    """Return the instructions in the text of ``cuobjdump --dump-sass``."""
    return [
        Instruction(
            int(address, 16), bool(predicate and predicate != "PT") or bool(_PREDICATE.match(operands)),
            opcode, operands,
        )
        for address, predicate, opcode, operands in _LINE.findall(text)
    ]  # fmt: skip


class Loop(NamedTuple):
    """A loop: the block that every iteration begins with, and all of its blocks, as their first addresses."""

    header: int
    blocks: frozenset[int]


class ControlFlow:
    """Blocks of instructions, and the loops that they form.

    Subroutines are left out: in these kernels they are slow paths of divisions.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._blocks, self._successors = split_blocks(instructions)
        self._entry = instructions[0].address
        self._reachable = self._reach(self._entry)
        # Each block with the blocks that are reached only through it.
        dominated = {block: self._reachable - self._reach(self._entry, block) for block in self._reachable}
        self._forward = {
            block: [after for after in self._successors[block] if block not in dominated[after]]
            for block in self._reachable
        }
        """Successors but those at the start of a loop that contains the block, so that every path ends."""

    def _reach(self, start: int, without: int = -1) -> set[int]:
        """Return the blocks that can be reached from ``start`` on paths without a block."""
        found, stack = set[int](), [start]
        while stack:
            block = stack.pop()
            if block != without and block not in found:
                found.add(block)
                stack += self._successors[block]
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        """All loops that do more than wait, by the address of their header."""
        blocks_of: dict[int, set[int]] = {}
        for latch in self._reachable:
            for header in set(self._successors[latch]) - set(self._forward[latch]):
                blocks_of.setdefault(header, {header}).update(self._before(latch, header))
        loops = [Loop(header, frozenset(blocks)) for header, blocks in sorted(blocks_of.items())]
        return [loop for loop in loops if not self._only_waits(loop)]

    def _before(self, latch: int, header: int) -> set[int]:
        """Return the blocks of a loop from which ``latch`` is reached without its header."""
        found, stack = set[int](), [latch]
        while stack:
            block = stack.pop()
            if block != header and block not in found:
                found.add(block)
                stack += [other for other in self._reachable if block in self._successors[other]]
        return found

    def _only_waits(self, loop: Loop) -> bool:
        return sum(len(self._blocks[block]) for block in loop.blocks) < WAIT_INSTRUCTIONS

    def code(self, descriptor_loads: int) -> Code:
        """Return what a warp executes."""
        steps, tile = [], NOTHING
        for loop in self.loops:
            inner = [other for other in self.loops if other.blocks < loop.blocks]
            longest = self._path(loop, inner, longest=True)
            if inner:
                tile = tile.plus(longest)
            else:
                steps.append(self._path(loop, longest=False))
                tile = tile.plus(longest.minus(steps[-1]))
        whole = Loop(self._entry, frozenset(self._reachable))
        return Code(
            once=self._path(whole, self.loops, longest=True),
            tile=tile,
            steps=tuple(steps),
            descriptor_loads=descriptor_loads,
        )

    def _path(self, loop: Loop, inner: Iterable[Loop] = (), *, longest: bool) -> Executed:
        """Return what an iteration executes on its longest or shortest path, without inner loops."""
        skipped = {block for other in inner for block in other.blocks}
        ends = {block for block in loop.blocks if self._blocks[block][-1].name in {"EXIT", "RET"}}
        choose = max if longest else min
        best: dict[int, Executed | None] = {}

        def path_from(block: int) -> Executed | None:
            if block not in best:
                after = [path_from(other) for other in self._forward[block] if other in loop.blocks]
                if loop.header in self._successors[block] or block in ends:
                    after.append(NOTHING)
                found = [path for path in after if path is not None]
                own = NOTHING if block in skipped else executed(self._blocks[block])
                best[block] = own.plus(choose(found)) if found else None
            return best[block]

        return path_from(loop.header) or NOTHING


def executed(instructions: Iterable[Instruction]) -> Executed:
    """Return what a warp executes in a block."""
    flops = [instruction.tensor_flops for instruction in instructions]
    return Executed(len(flops), sum(flops))


def split_blocks(
    instructions: Sequence[Instruction],
) -> tuple[dict[int, list[Instruction]], dict[int, list[int]]]:
    """Split instructions into blocks, which only begin with a target of a branch and only end with a branch.

    Returns:
        The instructions and the successors of each block, by its first address.
    """
    begins = {instructions[0].address}
    for instruction, after in pairwise(instructions):
        if instruction.ends_block:
            begins |= {after.address, *instruction.targets}
    blocks: dict[int, list[Instruction]] = {}
    for instruction in instructions:
        if instruction.address in begins:
            current = blocks.setdefault(instruction.address, [])
        current.append(instruction)
    order = sorted(blocks)
    successors = {}
    for first, following in zip(order, [*order[1:], None], strict=True):
        last = blocks[first][-1]
        goes_on = not last.ends_block or last.is_conditional
        successors[first] = [*last.targets, *([following] if goes_on and following is not None else [])]
    return blocks, successors
