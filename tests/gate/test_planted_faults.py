"""Every planted fault ends the gate with its exit code and is named; a broken rule misses its fault."""

import datetime as dt
from collections.abc import Callable

import msgspec
import pytest

from esbench.gate import decision, evidence, proceedings, referee, waivers, worker_process
from esbench.gate.decision import Evidence, judge
from esbench.gate.protocol import Answer, Opened, Question, Visited
from esbench.gate.records import Decision, Opening, Settings, Surveyed, Timed
from tests.gate.planted_faults import PLANTS, Plant, Trial, trial


@pytest.mark.parametrize("plant", PLANTS, ids=[plant.meaning for plant in PLANTS])
def test_a_fault_ends_with_its_exit_code_and_is_named(plant: Plant) -> None:
    """A revision against itself passes; nothing else does, unless it was accepted."""
    found = trial(plant)
    assert found.holds, f"{found.code}: {found.said}"
    assert "\n" not in found.said
    assert "Traceback" not in found.said


def test_every_fault_of_a_stand_in_is_planted() -> None:
    """And those with an exit code other than 0 are the most."""
    assert {plant.code for plant in PLANTS} == {0, 1, 2, 3}
    assert sum(plant.code == 0 for plant in PLANTS) == 2
    assert len({plant.meaning for plant in PLANTS}) == len(PLANTS)


Break = Callable[[pytest.MonkeyPatch], None]


def ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every judgement end with 0."""
    for module in (decision, waivers):
        monkeypatch.setattr(module, "exit_code", lambda *_: 0)


def allows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a cell take twice as long."""

    def lenient(opening: Opening, found: Evidence, settings: Settings, **others: object) -> Decision:
        wide = msgspec.structs.replace(settings, margin=1.0)
        return judge(opening, found, wide, **others)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(proceedings, "judge", lenient)


def has_no_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at no control."""
    monkeypatch.setattr(decision, "control_verdicts", lambda *_: ((), []))


def is_never_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what there is for all that there should be."""
    monkeypatch.setattr(decision, "_incomplete", lambda *_: ())


def counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare no counts."""
    monkeypatch.setattr(decision, "_counts", lambda *_: ())


def misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what head lacks for what base lacks."""
    survey = referee._surveyed  # noqa: SLF001  # what is broken here

    def blind(*arguments: object) -> Surveyed:
        row = survey(*arguments)  # type: ignore[arg-type]  # passed on as they came
        return msgspec.structs.replace(row, status="absent" if row.status == "failed" else row.status)

    monkeypatch.setattr(referee, "_surveyed", blind)
    monkeypatch.setattr(decision, "_exact", lambda _: ())


def confirms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing again: whom the screen suspects stays a suspect."""
    monkeypatch.setattr(proceedings, "kept", lambda *_: [])


def knows_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the mean over cells for no effect at all."""
    monkeypatch.setattr(decision, "geometric_mean", lambda found: [0.0] * len(next(iter(found.values()))))


def sees_one_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare base with itself."""
    of_both = evidence.estimate
    monkeypatch.setattr(
        decision,
        "estimate",
        lambda timed, trim: of_both(msgspec.structs.replace(timed, head=timed.base), trim),
    )


def sees_noise_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what could not be seen for what is not there."""
    bounds = evidence.bounds

    def sharp(*arguments: object, **others: object) -> object:
        found = bounds(*arguments, **others)  # type: ignore[arg-type]  # passed on as they came
        return msgspec.structs.replace(found, mde=0.0)

    monkeypatch.setattr(decision, "bounds", sharp)
    has_no_controls(monkeypatch)


def believes_any_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take what cannot be believed for what was asked for."""
    ask = worker_process.Child.ask

    def trusting(
        self: worker_process.Child, question: Question, kind: type[Answer], silence_s: float
    ) -> object:
        try:
            return ask(self, question, kind, silence_s)
        except worker_process.WorkerError:
            if kind is Opened:
                return Opened(number=0, arm=self.arm, launch_ns=1e5)
            return Visited(number=0, arm=self.arm, samples=(1e5,) * 8)

    monkeypatch.setattr(worker_process.Child, "ask", trusting)


def takes_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time by whatever has come."""
    monkeypatch.setattr(
        referee.Referee,
        "_visit",
        lambda _self, _workers, name, *_: Timed(
            cell=name, first=("base",), base=((1.0,), (1.0,)), head=((1.0,), (1.0,))
        ),
    )


def takes_any_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure whatever was loaded from wherever."""
    monkeypatch.setattr(proceedings, "_hold", lambda *_: None)


def forgets_acceptances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an acceptance hold for ever."""
    monkeypatch.setattr(waivers, "_was_asked", lambda *_: False)


def never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an acceptance hold for ever."""
    read = waivers.read
    monkeypatch.setattr(waivers, "read", lambda folder, _: read(folder, dt.date.min))


@pytest.mark.parametrize(
    ("broken", "meaning"),
    [
        (ends_well, "an output is wrong"),
        (ends_well, "a worker is killed"),
        (ends_well, "the planted 2 % do not show"),
        (allows_everything, "one cell is slower by 2 %"),
        (has_no_controls, "the planted 2 % do not show"),
        (has_no_controls, "the same work takes longer in one arm"),
        (is_never_incomplete, "no cell is in both arms"),
        (counts_nothing, "a call holds one byte more"),
        (misses_nothing, "a variant was removed"),
        (confirms_nothing, "one cell is slower by 2 %"),
        (knows_no_mean, "every cell is slower by 1.2 %"),
        (sees_one_arm, "one cell is slower by 2 %"),
        (sees_noise_nowhere, "the machine is too noisy to see anything"),
        (believes_any_answer, "a worker prints garbage"),
        (believes_any_answer, "an answer is that of the other arm"),
        (takes_any_number_of_times, "a launch has no time"),
        (takes_any_package, "a package is not the tree's own"),
        (forgets_acceptances, "an acceptance that accepts nothing"),
        (never_expires, "an acceptance that has expired"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_broken_rule_misses_its_fault(broken: Break, meaning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that it was for is not met as it must be."""
    (plant,) = [one for one in PLANTS if one.meaning == meaning]
    broken(monkeypatch)
    found = trial(plant)
    assert not found.holds, f"{found.code}: {found.said}"


def test_a_trial_holds_by_its_code_and_by_what_was_said() -> None:
    """The right exit code for another reason is not enough."""
    plant = Plant("killed", 3, "signal 9", "a worker is killed")
    assert Trial(plant, 3, "the worker of head ended: with signal 9").holds
    assert not Trial(plant, 3, "the machine is too noisy").holds
    assert not Trial(plant, 0, "with signal 9").holds
