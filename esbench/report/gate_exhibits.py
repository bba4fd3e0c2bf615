"""The tables of a study of the gate, one for each question, each with what it shows in a few sentences."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
from scipy import stats

from esbench.report import variances
from esbench.report.gate_arrays import Logs
from esbench.report.gate_findings import Findings, Resampled
from esbench.report.gate_goals import too_few
from esbench.report.goals import percent
from esbench.report.passages import table
from esbench.report.resampling import Power
from esbench.report.rules import LEVELS, RESAMPLES
from esbench.units import ABSENT, format_number

_LARGEST = 5
"""So many cells are named."""


def false_alarms(found: Findings) -> list[str]:
    """Suites in which nothing differs."""
    resampled = found.resampled
    title, settings = "### False alarms", found.settings
    if resampled is None:
        return [title, f"Not shown: {too_few(found)}."]
    replicates = found.arrays.cells.replicates
    apart = replicates // found.needed
    text = (
        f"A suite is what one gate would have measured: {settings.screen} replicates of all cells for the "
        f"screen and {settings.confirm} others, of what the screen keeps, to confirm, drawn without "
        f"replacement from the {replicates}, and judged by the gate's own rule. Both arms are the same "
        "revision, so a replicate has its arms swapped at random, in all cells together; the last column "
        f"leaves them as they were measured. Suites share replicates: {replicates} are enough for {apart} "
        "that have none in common. So they are not independent, and the upper bound (Clopper and Pearson) is "
        "what it would be if they were."
    )
    both = (resampled.alarms, resampled.as_measured)
    rows = [
        ("suites", *(one.suites for one in both)),
        ("comparisons of a cell", *(one.comparisons for one in both)),
        ("suites with a FAIL", *(one.alarmed for one in both)),
        ("share of suites with a FAIL", *(percent(one.rate) for one in both)),
        ("its upper bound at 95 %", *(percent(one.most) for one in both)),
        ("suites in which the geometric mean FAILs", *(one.by_mean for one in both)),
        ("comparisons that FAIL", *(one.failed for one in both)),
        ("share of comparisons that FAIL", *(percent(one.failed / one.comparisons) for one in both)),
        (
            "share of comparisons that are INCONCLUSIVE",
            *(percent(one.inconclusive / one.comparisons) for one in both),
        ),
        ("suites that end INCONCLUSIVE", *(one.unclear for one in both)),
        ("cells that the screen keeps, on average", *(format_number(one.kept) for one in both)),
    ]
    return [
        title,
        text,
        table(("what", "arms swapped at random", "as measured"), rows),
        f"{_offset(found.arrays.cells)} {_controls(resampled)}".rstrip(),
        *_seen(resampled, len(found.arrays.cells.names)),
    ]


def power(found: Findings) -> list[str]:
    """Cells that were made slower."""
    title, resampled = "### Power: times made longer", found.resampled
    if resampled is None:
        return [title, f"Not shown: {too_few(found)}."]
    text = (
        "In each suite one cell, chosen at random, takes longer in head by a known share, or all cells do. A "
        f"slowdown no larger than the margin, {percent(found.settings.margin)}, is not to be found, by "
        "design. `another named`: suites in which a cell FAILs that was left as it is."
    )
    rows = [_row("one cell", one, str(one.others), str(one.by_mean)) for one in resampled.shifted]
    rows += [_row("all cells, by the mean", one, ABSENT, str(one.by_mean)) for one in resampled.everywhere]
    header = ("what", "slower by", "suites", "found in", "another named", "the mean FAILs")
    return [title, text, table(header, rows)]


def planted(found: Findings) -> list[str]:
    """Work that really is more."""
    title, resampled = "### Power: more work", found.resampled
    if resampled is None:
        return [title, f"Not shown: {too_few(found)}."]
    if not resampled.controls:
        return [title, "Not shown: the study holds no work of a known surplus."]
    text = (
        "The gate's own work, with really more of it in head, was measured like every cell. Here it is "
        "judged as one more cell of a suite, its arms as they were measured. What was read of it is the "
        "geometric mean over all replicates with its 95 % interval; `could see` is the least slowdown that "
        f"would have been found with a probability of {percent(found.settings.power)}, median over suites. "
        f"{percent(found.settings.margin)} more is the margin itself and is not to be found, by design."
    )
    rows = [
        (
            one.logs.names[0],
            percent(one.power.slower),
            _effect(one.logs.logs[0].tolist()),
            percent(one.seen.screen[0]),
            percent(one.seen.confirm[0]),
            percent(one.power.share),
            one.power.others,
        )
        for one in resampled.controls
    ]
    header = (
        "control",
        "more work",
        "read",
        "screen could see",
        "confirmation could see",
        "found in",
        "another named",
    )
    return [title, text, table(header, rows)]


def variance(found: Findings) -> list[str]:
    """What comes from the processes."""
    title, splits = "### Within and between processes", found.splits
    if not splits:
        return [title, "Not shown: that takes two replicates of a cell and some rounds in each."]
    text = (
        "The variance of a cell's replicates, beside what the spread of the rounds inside them explains: the "
        "squared standard error of their trimmed mean. What is left comes with the process, or drifts more "
        "slowly than a replicate lasts; no number of rounds takes it away, only fresh processes do. Over all "
        f"cells together it is {percent(variances.pooled(splits))} of the variance; with "
        f"{found.arrays.cells.replicates} replicates a single cell's share is rough."
    )
    shares = [one.share for one in splits]
    totals = [math.sqrt(one.total) for one in splits]
    betweens = [math.sqrt(one.between) for one in splits]
    spread = [
        ("share of the processes", *_quantiles(shares)),
        ("standard deviation of a replicate", *_quantiles(totals)),
        ("standard deviation between processes", *_quantiles(betweens)),
    ]
    largest = sorted(splits, key=lambda one: -one.between)[:_LARGEST]
    rows = [
        (
            one.cell,
            percent(math.sqrt(one.total)),
            percent(math.sqrt(one.within)),
            percent(math.sqrt(one.between)),
            percent(one.share),
        )
        for one in largest
    ]
    return [
        title,
        text,
        table(("over cells", "p20", "median", "p80", "max"), spread),
        "The cells whose processes differ most:",
        table(("cell", "standard deviation", "by the rounds", "between processes", "share"), rows),
    ]


def beside(found: Findings) -> list[str]:
    """The rules of other tools on the same launches."""
    title = "### Beside the rules of other tools"
    if not found.records:
        return [title, "Not shown: no cell stands in every replicate."]
    first = found.records[0]
    text = (
        "Each rule judges head against base by the launches of one replicate, one process an arm, as these "
        f"tools do: {first.comparisons} comparisons, which are all replicates of all cells with the arms as "
        "measured and swapped; a suite is all cells of one of them. A slowdown is planted by multiplying "
        f"head's samples. criterion's is a bootstrap of {RESAMPLES} resamples whose 95 % interval of the "
        "ratio of means must lie above 1.01; asv's takes medians apart by the factor and a two-sided U "
        "test. A threshold finds a slowdown of just its size in half of the comparisons. Ours takes "
        f"{found.settings.screen} replicates, {found.needed} for a cell that the screen keeps, and is judged "
        "on the suites above. Interleaved data are kinder to these rules than the runs that they are used "
        "on, one after the other and often days or machines apart."
    )
    planted_levels = LEVELS[2:]
    rows: list[tuple[object, ...]] = []
    if found.resampled:
        alarms = found.resampled.alarms
        ours = {one.slower: one.share for one in found.resampled.shifted}
        rows.append(
            (
                "esbench gate",
                percent(alarms.failed / alarms.comparisons),
                percent(alarms.rate),
                *(percent(ours[slower]) for slower in planted_levels),
            )
        )
    rows += [
        (
            one.rule,
            percent(one.flagged[0.0]),
            percent(one.alarmed / one.suites),
            *(percent(one.flagged[slower]) for slower in planted_levels),
        )
        for one in found.records
    ]
    header = (
        "rule",
        "false alarms: cells",
        "false alarms: suites",
        *(f"found at +{100 * slower:g} %" for slower in planted_levels),
    )
    return [title, text, table(header, rows)]


def _seen(resampled: Resampled, cells: int) -> list[str]:
    """What could have been seen of the cells."""
    rows = [
        ("at the screen", *_quantiles(resampled.seen.screen)),
        ("after confirmation, judged alone", *_quantiles(resampled.seen.confirm)),
    ]
    text = (
        "The least slowdown of a cell that would have been found with a probability of 80 %, by the spread "
        f"of the replicates at hand: the median over suites, distributed over the {cells} cells. The screen "
        "asks for any slowdown at all, the confirmation for one beyond the margin."
    )
    return [text, table(("over cells", "p20", "median", "p80", "max"), rows)]


def _controls(resampled: Resampled) -> str:
    found = resampled.misbehaved
    if found is None:
        return ""
    return (
        f"Of {found.suites} suites the gate's own controls would have made {found.deaf} invalid because 2 % "
        f"more work was not found, and {found.unlike} because the same work differed between the arms."
    )


def _offset(cells: Logs) -> str:
    """Say whether the arms are alike: swapping them would hide it if they were not."""
    means = cells.logs.mean(axis=0).tolist()
    return f"With the arms as measured, head takes longer by {_effect(means)} (geometric mean over cells)."


def _effect(logs: Sequence[float]) -> str:
    """The geometric mean of some ratios with its 95 % interval by Student's t, as a signed percentage."""
    mean = fmean(logs)
    if len(logs) < 2:  # noqa: PLR2004  # one value has no spread
        return _signed(mean)
    half = float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return f"{_signed(mean)} ({_signed(mean - half)} to {_signed(mean + half)})"


def _signed(log: float) -> str:
    return f"{100 * math.expm1(log):+.3f} %"


def _quantiles(values: Sequence[float]) -> list[str]:
    return [percent(float(one)) for one in np.quantile(values, (0.2, 0.5, 0.8, 1.0))]


def _row(what: str, one: Power, others: str, by_mean: str) -> tuple[object, ...]:
    return (what, percent(one.slower), one.suites, percent(one.share), others, by_mean)
