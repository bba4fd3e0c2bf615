"""Sweeps from small to large: who is too slow or has no room is not tried on what is larger."""

from collections.abc import Callable

import msgspec

from esbench.measure.plan import Plan
from esbench.measure.recorder import Stopwatch
from esbench.measure.runner import Past, run_cases
from esbench.schema import Case, Checkpoint, Measurement, Record, Row, Skipped
from tests.fakes import CASE, FakeScheme, World

CASES = tuple(msgspec.structs.replace(CASE, members=members) for members in (256, 64, 1024, 16))


def sweep(world: World, *schemes: FakeScheme, stop_s: float = 1e9, past: Past | None = None) -> list[Record]:
    """Measure forward calls of schemes over the members; return what was stored."""
    lines: list[Record] = []
    plan = Plan(
        entries=[scheme.entry() for scheme in schemes],
        cases=CASES,
        phases=("forward",),
        cell_s=1.0,
        sweep="members",
        stop_s=stop_s,
    )
    run_cases(plan, lines.extend, lambda *_: None, world.tools, past, Stopwatch(world.clock.seconds))
    return lines


def reasons(lines: list[Record]) -> list[tuple[str, int, str]]:
    """Return scheme, members and reason of the rows without a number."""
    return [(row.variant.scheme, row.case.members, row.reason) for row in lines if isinstance(row, Skipped)]


def timed(lines: list[Record], scheme: str) -> list[int]:
    """Return the populations on which a scheme was timed, in the order of the run."""
    return [
        row.case.members
        for row in lines
        if isinstance(row, Measurement) and row.metric == "latency_ns" and row.variant.scheme == scheme
    ]


def slower(world: World) -> Callable[[Case], None]:
    """Return a check that takes as many seconds as there are members."""

    def check(case: Case) -> None:
        world.clock.now_s += case.members

    return check


def test_a_sweep_goes_from_small_to_large() -> None:
    """Whatever the order of the suite's cases, and whatever the seed."""
    world = World()
    assert timed(sweep(world, FakeScheme("A", world)), "A") == [16, 64, 256, 1024]


def test_what_takes_too_long_on_one_case_is_not_tried_on_larger_ones() -> None:
    """The reason names the case that took too long, its time and the budget; the others go on."""
    world = World()
    slow, quick = FakeScheme("Slow", world, check=slower(world)), FakeScheme("Quick", world)
    lines = sweep(world, slow, quick, stop_s=60.0)
    assert timed(lines, "Slow") == [16, 64]
    assert timed(lines, "Quick") == [16, 64, 256, 1024]
    ((_, _, first), (_, _, second)) = reasons(lines)
    assert first == second
    assert first.startswith("time budget: members 64 took 64")
    assert first.endswith(" s in all, above 60 s")
    assert [members for _, members, _ in reasons(lines)] == [256, 1024]


def test_what_has_no_room_on_one_case_is_not_tried_on_larger_ones() -> None:
    """The first case that does not fit says how many members do, by bisection."""
    world = World(room_bytes=1000)
    lines = sweep(world, FakeScheme("Big", world, bytes_per_member=5))
    assert timed(lines, "Big") == [16, 64]
    assert reasons(lines) == [
        ("Big", 256, "out of memory: tried to allocate 1290 bytes"),
        ("Big", 1024, "stopped: out of memory already at members 256"),
    ]
    (row,) = (row for row in lines if isinstance(row, Measurement) and row.metric == "largest_members")
    (members,) = row.samples[0]
    assert row.case.members == 256
    assert 190 <= members <= (1000 - 10) / 5


def test_what_a_case_cost_before_a_run_was_cut_off_counts_when_it_goes_on() -> None:
    """Cut between the phase's last line and the case's, the variant is stopped all the same."""
    world = World()
    slow = FakeScheme("Slow", world, check=slower(world))
    whole = sweep(world, slow, stop_s=60.0)
    ends = [number for number, line in enumerate(whole) if isinstance(line, Checkpoint) and line.phase]
    kept = whole[: ends[1] + 1]  # after the phase of 64 members, which took too long
    past = Past(
        [line for line in kept if isinstance(line, Row)],
        [line for line in kept if isinstance(line, Checkpoint)],
    )
    world = World()
    rest = sweep(world, FakeScheme("Slow", world), stop_s=60.0, past=past)
    assert [members for _, members, _ in reasons([*kept, *rest])] == [256, 1024]
    assert timed(rest, "Slow") == []
