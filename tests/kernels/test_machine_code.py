"""Counts of instructions in machine code, from invented code."""

from collections.abc import Sequence

from esbench.compiled import Code, Executed
from impls.kernels.machine_code import ControlFlow, parse


def sass(lines: Sequence[str]) -> str:
    """Return text like that of cuobjdump, of an instruction each 16 bytes; L<n> is the address of line n."""
    for index in reversed(range(len(lines))):
        lines = [line.replace(f"L{index}", hex(16 * index)) for line in lines]
    return "".join(f"        /*{16 * i:04x}*/   {line} ;   /* 0x01 */\n" for i, line in enumerate(lines))


def code(*lines: str) -> Code:
    """Return what the lines execute."""
    return ControlFlow(parse(sass(lines))).code(0)


WORK = ["IMAD R1, R2, R3, RZ"] * 12
PRODUCT = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
FLOPS = 2 * 64 * 256 * 16 // 4


def test_loops_are_counted_apart_from_what_is_around_them() -> None:
    """An inner loop has steps, an outer one executes more; a wait and a subroutine add nothing."""
    found = code(
        "MOV R1, c[0x0][0x28]",
        "@P0 CALL.REL.NOINC L46",
        *WORK,  # 2: a tile begins
        "@!P1 BRA L43",  # 14: waits out of line
        PRODUCT,  # 15: a step
        *WORK,
        "@P1 BRA L15",  # 28
        *WORK,
        "@P2 BRA L2",  # 41: the next tile
        "EXIT",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2], R3",  # 43
        "@!P1 BRA L43",
        "BRA L15",
        "RET.REL.NODEC R2",  # 46
    )
    assert found.once == Executed(3, 0)
    assert found.tile == Executed(29, 0)  # with the wait
    assert found.steps == (Executed(14, FLOPS),)
    assert found.loop_instructions == 14
    assert found.other_instructions == 32


def test_a_loop_over_tiles_and_channels_has_steps_that_end_a_tile() -> None:
    """What only iterations that end a tile execute is that of a tile, not of a step."""
    found = code(
        "MOV R1, R2",
        PRODUCT,  # 1
        *WORK,
        "@P0 BRA L28",  # 14: no end of a tile
        *WORK,
        "STG.E desc[UR4][R2.64], R4",
        "@P1 BRA L1",  # 28
        "@P0 EXIT",
        "EXIT",
    )
    assert found.steps == (Executed(15, FLOPS),)
    assert found.tile == Executed(13, 0)
    assert found.once == Executed(3, 0)


def test_flops_are_those_of_a_bfloat16_product_that_takes_as_long() -> None:
    """Products of warps and of groups of four warps count by their shape; TF32 takes twice as long."""
    assert code("HMMA.16816.F32.BF16 R4, R8, R10, R4", "EXIT").once.flops == 2 * 16 * 8 * 16
    assert code("HMMA.1688.F32.TF32 R4, R8, R10, R4", "EXIT").once.flops == 2 * 2 * 16 * 8 * 8
    assert code("IGMMA.64x128x32.S8.S8 R4, gdesc[UR8], R4", "EXIT").once.flops == 64 * 128 * 32 // 4
    assert code("FFMA R4, R8, R10, R4", "EXIT").once.flops == 0
