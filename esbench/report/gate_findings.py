"""Everything that a study of the gate shows, worked out once for its page and its picture."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from esbench.gate.records import Settings
from esbench.gate.study import Study
from esbench.report import resampling, rules, variances
from esbench.report.gate_arrays import Arrays, Logs, arrays, pairs
from esbench.report.resampling import Alarms, Misbehaved, Power, Seen

SUITES = 1000
"""Suites in which nothing differs."""
TRIALS = 400
"""Suites for each slowdown, and those that are judged with the arms as they were measured."""
LEAST_COMPARISONS = 3000
"""So many times a cell is judged at least: a study of few cells has more suites."""
OWN = (0.0, 0.02)
"""The surplus of the controls that every gate has."""
EVERYWHERE = (0.007, 0.01)
"""By how much all cells are made slower together."""


@dataclass(frozen=True)
class Control:
    """Work of a known surplus by one method: what could have been seen of it, and how often it is found."""

    logs: Logs
    seen: Seen
    power: Power


@dataclass(frozen=True)
class Resampled:
    """What a gate would have said."""

    alarms: Alarms
    as_measured: Alarms
    seen: Seen
    shifted: Sequence[Power]
    everywhere: Sequence[Power]
    controls: Sequence[Control]
    misbehaved: Misbehaved | None


@dataclass(frozen=True)
class Findings:
    """What a study shows; ``resampled`` is None where there are too few replicates or cells."""

    study: Study
    arrays: Arrays
    settings: Settings
    resampled: Resampled | None
    records: Sequence[rules.Record]
    splits: list[variances.Split] = field(default_factory=list)

    @property
    def needed(self) -> int:
        """How many replicates a gate takes."""
        return self.settings.screen + self.settings.confirm


def findings(study: Study, settings: Settings | None = None) -> Findings:
    """Work everything out.

    Raises:
        UserError: a replicate of the study is none.

    """
    rule = settings or Settings()
    found = arrays(study, rule.trim)
    return Findings(
        study=study,
        arrays=found,
        settings=rule,
        resampled=_resampled(found, rule) if resampling.enough(found.cells, rule) else None,
        records=rules.records(pairs(study, found.cells.names)),
        splits=variances.splits(found.cells),
    )


def _resampled(found: Arrays, rule: Settings) -> Resampled:
    cells = found.cells
    own = [found.controls[more] for more in OWN if more in found.controls]
    suites = max(SUITES, -(-LEAST_COMPARISONS // len(cells.names)))
    return Resampled(
        alarms=resampling.alarms(cells, rule, suites),
        as_measured=resampling.alarms(cells, rule, TRIALS, swapped=False),
        seen=resampling.seen(cells, rule, TRIALS),
        shifted=[resampling.shifted(cells, rule, slower, TRIALS) for slower in rules.LEVELS if slower],
        everywhere=[resampling.everywhere(cells, rule, slower, TRIALS) for slower in EVERYWHERE],
        controls=[
            Control(
                one, resampling.seen(one, rule, TRIALS), resampling.planted(cells, one, rule, more, TRIALS)
            )
            for more, logs in found.controls.items()
            for one in resampling.each(logs)
        ],
        misbehaved=resampling.misbehaved(own, rule, suites) if len(own) == len(OWN) else None,
    )
