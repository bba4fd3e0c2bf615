"""Companies of variants that fit into memory beside base, on fakes."""

from typing import Any

from esbench.measure.recorder import RunSummary
from tests.fakes import FEWEST_ROUNDS, FakeScheme, World
from tests.loop_cases import latencies, measure, skipped


def test_all_variants_of_a_case_share_their_rounds() -> None:
    """Rounds of one phase are of one group; base stays as long as the variant."""
    world = World()
    _, rows = measure(
        FakeScheme("A", world).entry(),
        FakeScheme("Base", world).entry("base"),
        world=world,
        phases=("forward",),
    )
    assert [(row.group, len(row.samples)) for row in latencies(rows)] == [(0, FEWEST_ROUNDS)] * 2


def test_what_does_not_fit_beside_the_others_waits_for_the_next_group() -> None:
    """Whether it is set up, enters a phase or is called: the base is measured again beside it."""
    cases: list[str] = [
        "built_bytes",
        "entered_bytes",
        "call_bytes",
    ]
    for need in cases:
        world = World(room_bytes=1000)
        needs: dict[str, Any] = {need: 600}
        entries = [FakeScheme(name, world, **needs).entry() for name in "AB"]
        outcome, rows = measure(
            FakeScheme("Base", world).entry("base"), *entries, world=world, phases=("forward",)
        )
        groups = [(row.group, row.variant.scheme) for row in latencies(rows)]
        if need == "call_bytes":  # a call's memory is free again when the next variant is called
            assert groups == [(0, "Base"), (0, "A"), (0, "B")]
        else:
            assert groups == [(0, "Base"), (0, "A"), (1, "Base"), (1, "B")]
        assert outcome.unavailable == outcome.failed == 0


def test_base_has_room_before_the_variants_it_is_compared_with() -> None:
    """Where base's call does not fit beside the variants, the last of these waits."""
    world = World(room_bytes=1000)
    base = FakeScheme("Base", world, call_bytes=300)
    guests = [FakeScheme(name, world, built_bytes=400).entry() for name in "AB"]
    _, rows = measure(base.entry("base"), *guests, world=world, phases=("forward",))
    assert [(row.group, row.variant.scheme) for row in latencies(rows)] == [
        (0, "Base"),
        (0, "A"),
        (1, "Base"),
        (1, "B"),
    ]


def test_base_takes_its_memory_first() -> None:
    """However late it is registered: it is there in every group, the variants take what is left."""
    world = World(room_bytes=1000)
    variant = FakeScheme("A", world, built_bytes=600).entry()
    _, rows = measure(variant, FakeScheme("Base", world, built_bytes=600).entry("base"), world=world)
    assert {row.variant.scheme for row in latencies(rows)} == {"Base"}
    assert [(name, status) for name, _, status, _ in skipped(rows)] == [("A", "unavailable")]


def test_a_reason_that_base_gives_in_every_group_is_one_row() -> None:
    """Its times are measured again in each group; why it has no sample is said once."""
    world = World(room_bytes=1000)
    entries = [FakeScheme(name, world, built_bytes=600).entry() for name in "AB"]
    base = FakeScheme("Base", world, phases=("forward",)).entry("base")
    outcome, rows = measure(base, *entries, world=world)
    assert skipped(rows) == [("Base", "sample", "unavailable", "it has no phase sample")]
    assert outcome == RunSummary(measured=6, unavailable=1)


def test_a_variant_that_never_fits_beside_base_is_unavailable() -> None:
    """Base is measured, and no further group is tried."""
    world = World(room_bytes=1000)
    base = FakeScheme("Base", world, call_bytes=300).entry("base")
    outcome, rows = measure(base, FakeScheme("A", world, built_bytes=800).entry(), world=world)
    assert skipped(rows) == [("A", None, "unavailable", "out of memory: tried to allocate 300 bytes")]
    assert outcome == RunSummary(measured=2, unavailable=1)


def test_what_does_not_fit_alone_gets_a_row_with_the_bytes_and_the_run_goes_on() -> None:
    """Unavailable, not failed: the machine cannot, the variant is not to blame."""
    world = World(room_bytes=1000)
    big, small = FakeScheme("Big", world, built_bytes=5000).entry(), FakeScheme("A", world).entry()
    outcome, rows = measure(big, small, FakeScheme("Base", world).entry("base"), world=world)
    assert skipped(rows) == [("Big", None, "unavailable", "out of memory: tried to allocate 5000 bytes")]
    assert outcome == RunSummary(measured=4, unavailable=1)
