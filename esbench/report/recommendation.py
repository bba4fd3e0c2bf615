"""What to train with: the ranking of a case as advice, with reasons."""

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from esbench.report import captions
from esbench.report.choice import choose, holdings
from esbench.report.grid import LATENCY
from esbench.report.headline import headline
from esbench.report.qualities import ALONE, KAPPA, Part
from esbench.report.ranking import NOISE, RankedVariant, Rankings, dense, rankings
from esbench.report.words import one_line
from esbench.schema import Case, Run, Skipped, Variant
from esbench.units import format_multiplier, format_value

_WIDTH = 100


@dataclass(frozen=True)
class Advice:
    """The ranking of one case: ``standings`` are those asked for, less what memory rules out.

    ``part`` is the case's in the network that it is a layer of.
    """

    ranking: Rankings
    case: Case
    standings: tuple[RankedVariant, ...]
    part: Part = ALONE

    @property
    def ranked(self) -> list[RankedVariant]:
        """The variants with a rate, the best first."""
        return [one for one in self.standings if one.rate is not None]

    @property
    def best(self) -> RankedVariant | None:
        """The variant to train with, ``None`` where none has a number."""
        return next(iter(self.ranked), None)

    def text(self) -> str:
        """The table, and what it comes to, for a terminal."""
        table = headline(self.ranking, self.case, self.standings).text()
        return "\n".join([table, *(textwrap.fill(one_line(line), _WIDTH) for line in self._reasons()), ""])

    def _reasons(self) -> Iterator[str]:
        best = self.best
        if best is None:
            yield "Nothing can be recommended here: no variant has a number, the table says why."
            return
        if self.part.own < self.part.whole:
            yield (
                f"In a network n_eff = n / (1 + kappa n / d) has the network's d, {self.part.whole}, of "
                f"which a layer like this has {self.part.own}: each layer's noise is the others' as well."
            )
        reference, fastest = dense(self.ranked), min(self.ranked, key=lambda one: one.step_ns or 0.0)
        against = ""
        if reference and reference != best and (times := best.times(reference)):
            against = f", {format_multiplier(times)} what {_name(reference)} gives"
        yield f"Best: {_name(best)} with {_rate(best)}{against}."
        if alike := best.alike(self.ranked):
            yield f"It is {alike}: their intervals reach its own."
        yield f"It {_kept(best)}; a step takes {_took(best)}."
        if fastest != best:
            yield f"{_name(fastest)} is faster, {_took(fastest)}, but {_kept(fastest)}."


def advise(
    runs: Iterable[Run],
    case: Case,
    *,
    variants: Collection[Variant] | None = None,
    limit_bytes: float | None = None,
    part: Part = ALONE,
) -> tuple[Advice | None, str]:
    """The ranking of a case in the run that says most of it, and a line on those that were passed over.

    ``None`` where no run ranks the case, or none says anything of the variants.

    Args:
        runs: of one device.
        case: what is to be trained.
        variants: those to choose from, by default all.
        limit_bytes: how much noise, and how large a peak, a step may have.
        part: what the case is of a network, by default all.

    """
    found = holdings(tuple(runs), case, variants, part)
    if not found:
        return None, ""
    chosen, passed_over = choose(found, variants)
    return Advice(chosen.ranking, case, tuple(within(chosen.standings, limit_bytes)), part), passed_over


def ranked_labels(runs: Iterable[Run]) -> list[str]:
    """The cases that some runs hold a ranking of."""
    operators = ((run, operator) for run in runs for operator in {row.case.operator for row in run.rows})
    cases = {case for run, operator in operators for one in rankings(run, operator) for case in one.cases}
    return sorted(case.label for case in cases)


def without_numbers(run: Run, case: Case) -> str:
    """Why the variants of a case have no number, a line for each reason, where no ranking can say it."""
    found = dict.fromkeys(
        f"  {row.variant.label(case.operator)}: {row.status}: {one_line(row.reason)}"
        for row in run.skipped
        if row.case == case and row.variant.mode == "batched"
    )
    return (
        "\n".join(["No variant has both a time and a quality:", *(found or ["  the run holds no reason"])])
        + "\n"
    )


def within(standings: Sequence[RankedVariant], limit_bytes: float | None) -> list[RankedVariant]:
    """The standings in their order; what needs more memory comes behind them, with that as its reason."""
    bounded = [one if limit_bytes is None else _bounded(one, limit_bytes) for one in standings]
    return sorted(bounded, key=lambda one: one.rate is None)


def _bounded(one: RankedVariant, limit_bytes: float) -> RankedVariant:
    if one.rate is None:
        return one
    needs = {"noise": one.noise_bytes, "peak": one.peak_bytes}
    above = {what: size for what, size in needs.items() if size is not None and size > limit_bytes}
    unknown = [what for what, size in needs.items() if size is None]
    if above:
        said = " and ".join(f"{what} {format_value(NOISE, size)}" for what, size in above.items())
        reason = f"memory limit: {said} above {format_value(NOISE, limit_bytes)}"
    elif unknown:
        reason = f"memory unknown: the run holds no {' and no '.join(unknown)} to hold to the limit"
    else:
        return one
    skipped = Skipped(variant=one.variant, case=one.case, phase=None, status="unavailable", reason=reason)
    return replace(one, step_ns=None, skipped=skipped)


def _rate(one: RankedVariant) -> str:
    if one.is_exact:
        return "the exact gradient of a linear fitness in each step"
    return f"{one.rate_in_words} effective members per ms"


def _kept(one: RankedVariant) -> str:
    kappa = f"kappa {format_value(KAPPA, one.kappa.mean)}" if one.kappa else "kappa unknown"
    share = "is exact for a linear fitness" if one.is_exact else f"keeps {one.kept} of its members"
    return f"{share} ({kappa})"


def _took(one: RankedVariant) -> str:
    base = f", {format_multiplier(one.multiplier.value)} base" if one.multiplier else ""
    return f"{format_value(LATENCY, one.step_ns)}{base}"


def _name(one: RankedVariant) -> str:
    return one.variant.label(one.case.operator)


def origin(advice: Advice) -> str:
    """Which run the advice is from."""
    return captions.origin(advice.ranking.grid.run)
