"""The record of compiled kernels: what their machine code executes and needs, for floors of their times.

``impls/kernels/compiled.json`` is such a record, which ``python -m impls.kernels.compile_checks --record``
renews.
"""

import math
from pathlib import Path
from typing import NamedTuple

import msgspec

from esbench import store

SCHEMA = 1
FILE = "impls/kernels/compiled.json"
"""The committed record, relative to the root of the repository."""
RENEW = "python -m impls.kernels.compile_checks --record"


class Executed(NamedTuple):
    """What a warp executes: instructions, and flops of tensor cores.

    Flops are those of a bfloat16 product that takes as long: an operation on int8 counts half.
    """

    instructions: int
    flops: int

    def plus(self, other: "Executed") -> "Executed":
        """Return the sum."""
        return Executed(self.instructions + other.instructions, self.flops + other.flops)

    def minus(self, other: "Executed") -> "Executed":
        """Return the difference."""
        return Executed(self.instructions - other.instructions, self.flops - other.flops)


NOTHING = Executed(0, 0)


class Code(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a warp of a kernel executes.

    Attributes:
        once: outside of all loops.
        tile: in a loop over tiles for each of them, without the innermost loops; where a loop over tiles is
            one with that over channels, what an iteration that ends a tile executes more than another one.
        steps: an iteration of each innermost loop, in the order of the code.
        descriptor_loads: loads of tiles by descriptors in the source; 0 if the machine code has none.
    """

    once: Executed
    tile: Executed
    steps: tuple[Executed, ...]
    descriptor_loads: int

    @property
    def loop_instructions(self) -> int:
        """Instructions of an iteration of the loops with tensor cores, or of all innermost loops."""
        return sum(self.steps[index].instructions for index in self.main)

    @property
    def main(self) -> list[int]:
        """Indices of the innermost loops with tensor cores, or of all if none has."""
        return [i for i, step in enumerate(self.steps) if step.flops] or list(range(len(self.steps)))

    @property
    def other_instructions(self) -> int:
        """All other instructions."""
        inner = sum(step.instructions for step in self.steps) - self.loop_instructions
        return self.once.instructions + self.tile.instructions + inner


PROCESSORS = 132
"""Multiprocessors of an H100 or H200."""
REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65_536, 228 * 1024, 1024
"""Registers and shared memory of each of them, and bytes that a program takes besides its own."""
THREADS_OF_WARP = 32


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much a launch computes.

    Attributes:
        tiles: tiles of all programs; without a loop over tiles the number of programs.
        programs: on a GPU with :data:`PROCESSORS` multiprocessors.
        iterations: of each innermost loop of the code, for a tile.
        least_bytes: bytes of the operands, each read or written once.
        step_bytes: bytes that an iteration of a loop with tensor cores loads from the L2 cache.
        overlaps: whether the launch begins before the one that it waits for ends.
    """

    tiles: int
    programs: int
    iterations: tuple[int, ...]
    least_bytes: int
    step_bytes: int
    overlaps: bool


class CompiledKernel(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A kernel of a compile check.

    Attributes:
        title: of the check, unique.
        warps: of a program.
        registers: of a thread.
        shared_bytes: shared memory of a program.
        code: what a warp executes.
        work: of the launch, where it is known.
    """

    title: str
    warps: int
    registers: int
    shared_bytes: int
    code: Code
    work: Work | None = None

    @property
    def program_registers(self) -> int:
        """Registers of a program, which threads get in multiples of 8."""
        return THREADS_OF_WARP * self.warps * 8 * math.ceil(self.registers / 8)

    @property
    def fitting_programs(self) -> int:
        """Number of programs that fit on a multiprocessor."""
        return min(REGISTERS // self.program_registers, SHARED_BYTES // (self.shared_bytes + RESERVED_BYTES))

    def resident_programs(self, work: Work) -> int:
        """Return how many programs are on a multiprocessor at a time: as many as are launched and fit."""
        return max(1, min(self.fitting_programs, math.ceil(work.programs / PROCESSORS)))


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels compiled for compute capability 9.0, by title, and the version of Triton that compiled them."""

    schema: int = SCHEMA
    triton: str
    kernels: tuple[CompiledKernel, ...]

    def at(self, title: str) -> CompiledKernel | None:
        """Return the kernel of a check; None if it is not in the record."""
        return next((kernel for kernel in self.kernels if kernel.title == title), None)


def read(path: Path) -> Record:
    """Read a record.

    Raises:
        UserError: the file cannot be read or is no record.
    """
    again = f"write it again with `{RENEW}`"
    return store.read_document(path, Record, what="record of compiled kernels", schema=SCHEMA, again=again)


def write(record: Record, path: Path) -> None:
    """Write a record with a line for each kernel, so that changes of different kernels can be merged."""
    lines = ",\n".join(msgspec.json.encode(kernel).decode() for kernel in record.kernels)
    path.write_text(
        f'{{"schema":{record.schema},"triton":"{record.triton}","kernels":[\n{lines}\n]}}\n', encoding="utf-8"
    )
