"""Which of several stored runs answers a question about a case: the one that says most of what was asked."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from esbench.report.newest import flaws
from esbench.report.qualities import ALONE, Part
from esbench.report.ranking import RankedVariant, Rankings, rankings
from esbench.schema import Case, Run, Variant

_LISTED = 4
"""Of more names than these only so many are said."""


@dataclass(frozen=True)
class Holding:
    """What a run holds of a case: a ranking, and of it the variants that were asked for."""

    run: Run
    ranking: Rankings
    standings: tuple[RankedVariant, ...]

    @property
    def ranked(self) -> list[Variant]:
        """The variants with a rate."""
        return [one.variant for one in self.standings if one.rate is not None]

    @property
    def is_valid(self) -> bool:
        """Whether its figures may be used."""
        return not (self.run.end and self.run.end.invalid)

    def answers(self, variants: Collection[Variant] | None) -> bool:
        """Whether it says all that was asked: of these variants a number or a reason, or of a whole suite."""
        if variants is None:
            return not any(flaws(self.run))
        said = {one.variant for one in self.standings if one.rate is not None or one.skipped}
        return self.is_valid and said >= set(variants)


def holdings(
    runs: Sequence[Run], case: Case, variants: Collection[Variant] | None, part: Part = ALONE
) -> list[Holding]:
    """What the runs hold of a case, the newest first; a run that says nothing of the variants is left out.

    ``part`` is what the case is of a network.
    """
    found = []
    for run in sorted(runs, key=lambda run: run.header.run_id, reverse=True):
        ranking = next((one for one in rankings(run, case.operator) if case in one.cases), None)
        if ranking is None:
            continue
        wanted = tuple(one for one in ranking.of(case, part) if variants is None or one.variant in variants)
        if wanted:
            found.append(Holding(run, ranking, wanted))
    return found


def choose(found: Sequence[Holding], variants: Collection[Variant] | None) -> tuple[Holding, str]:
    """The holding to answer from, and a line on those that were passed over, empty where none was.

    It is the newest that answers all; where none does, the one with the most ranked variants, of these the
    newest. One that ranks something goes before all that rank nothing, and a valid one before invalid ones.

    Args:
        found: at least one, the newest first.
        variants: those that were asked for; without them a run of a whole suite answers all.

    """

    def worth(one: Holding) -> tuple[bool, bool, bool, int]:
        whole = one.answers(variants)
        return one.is_valid, bool(one.ranked), whole, 0 if whole else len(one.ranked)

    chosen = max(found, key=worth)  # of equals the first, which is the newest
    newer = found[: found.index(chosen)]
    older = [one for one in found[len(newer) + 1 :] if not set(one.ranked) <= set(chosen.ranked)]
    others = [f"newer {_holds(one)}" for one in newer] + [f"older {_holds(one)}" for one in older]
    shown = f"shows run {chosen.run.header.run_id}, which ranks {_count(chosen)}"
    return chosen, f"{shown}; passed over: {'; '.join(others)}" if others else ""


def names(variants: Collection[Variant]) -> str:
    """Names of variants, the first few of many."""
    listed = [variant.name for variant in variants]
    rest = len(listed) - _LISTED
    return ", ".join(listed[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _holds(one: Holding) -> str:
    why = " and ".join(flaws(one.run))
    return f"{one.run.header.run_id} ranks {_count(one)}" + (f", it {why}" if why else "")


def _count(one: Holding) -> str:
    return f"{len(one.ranked)} ({names(one.ranked)})" if one.ranked else "nothing"
