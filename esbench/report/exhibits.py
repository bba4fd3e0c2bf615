"""A study's tables, one for each question, each with what it shows in two sentences."""

import math

from esbench.report import evidence
from esbench.report.goals import percent, reasons, verdict
from esbench.report.passages import table
from esbench.report.text import escape
from esbench.schema import Run
from esbench.studies.timer_accuracy import Question, Study
from esbench.units import ABSENT, format_cell, format_number


def agreement(study: Study) -> list[str]:
    """This harness beside other timers."""
    rows = [
        (
            one.kernel,
            one.timer,
            format_cell("ours_ns", one.ours_ns),
            format_cell("theirs_ns", one.theirs_ns),
            _signed(one.difference),
            _signed(one.ratio.median - 1),
            _percentage(one.ratio.relative),
            one.rounds,
            verdict(one) if one.is_judged else "",
        )
        for one in evidence.agreements(study)
    ]
    header = (
        "kernel",
        "timer",
        "esbench (ms)",
        "timer (ms)",
        "difference of medians (%)",
        "in-round difference (%)",
        "± (%)",
        "rounds",
        "within 1 %",
    )
    return _section(
        "Beside other timers",
        "Every timer times every kernel in each round, there and back in a random order, with the same "
        "number of threads; the result of a call is freed inside all of them. The in-round difference "
        "compares like with like: means of a visit with a timer that reads one mean of a block, medians with "
        "one that reads each call; ± is half the 95 % interval of its median, and a difference of more than "
        "1 % is unclear where that interval reaches below. On a GPU, timers that flush the cache stand "
        "beside the time with a cold cache, the others beside that with a warm one.",
        table(header, rows),
        *_missing(study, "agreement"),
    )


def twins(study: Study) -> list[str]:
    """One call under two names, in the same rounds and apart."""
    header = (
        "kernel",
        "time (ms)",
        "ratio - 1 (%)",
        "± (%)",
        "half-range (%)",
        "first visited (%)",
        "rounds",
        "apart: ratio - 1 (%)",
        "apart: half-range (%)",
    )
    apart = {one.kernel: one for one in evidence.twins(study, "sequence")}
    rows = []
    for one in evidence.twins(study, "twins"):
        other = apart.get(one.kernel)
        rows.append(
            (
                one.kernel,
                format_cell("median_ns", one.median_ns),
                _signed(one.ratio.median - 1),
                _percentage(one.ratio.relative),
                _percentage(one.half_range),
                _signed(one.bias),
                one.rounds,
                _signed(other.ratio.median - 1) if other else ABSENT,
                _percentage(other.half_range) if other else ABSENT,
            )
        )
    return _section(
        "One call under two names",
        "The same call takes part twice in the harness's own rounds, so that every ratio should be 1. The "
        "half-range is half of what holds the middle 60 % of the rounds' ratios, ± half the 95 % interval of "
        "their median, and `first visited` how much longer took the one that the round began with. `apart` "
        "is the same pair measured one after the other: what interleaving buys.",
        table(header, rows),
        *_missing(study, "twins"),
    )


def lengths(study: Study) -> list[str]:
    """Waits of known length."""
    rows = [
        (
            one.kernel,
            format_cell("expected_ns", one.expected_ns),
            format_cell("median_ns", one.median_ns),
            format_number(one.excess_ns),
            _signed(one.error),
        )
        for one in evidence.lengths(study)
    ]
    if study.environment.device == "cuda":
        what = (
            "A kernel spins for a number of cycles. How long a cycle takes is not known, so the longest spin "
            "is taken to be right and the others show whether the readings are proportional to the lengths."
        )
    else:
        what = (
            "A loop reads the host's clock until a length is over. The harness reads the same clock: the "
            "excess is what the harness adds to a call, and does not say whether the clock goes right."
        )
    header = ("wait", "length (ms)", "read (ms)", "excess (ns)", "error (%)")
    return _section("A known length", what, table(header, rows), *_missing(study, "length"))


def replicates(study: Study) -> list[str]:
    """The same kernels in fresh processes."""
    rows = [
        (
            one.kernel,
            len(one.medians_ns),
            format_cell("median_ns", min(one.medians_ns)),
            format_cell("median_ns", max(one.medians_ns)),
            _percentage(one.variation),
        )
        for one in evidence.replicates(study)
    ]
    header = ("kernel", "processes", "least median (ms)", "largest median (ms)", "variation (%)")
    return _section(
        "Fresh processes",
        "Each process draws its own memory layout and times the kernels on its own. The variation is the "
        "coefficient of variation of the processes' medians; the goal is meant for a quiet H200.",
        table(header, rows),
        *_missing(study, "replicates"),
    )


def spent(quick: Run | None) -> list[str]:
    """Where the time of a run goes."""
    if quick is None or quick.end is None:
        return _section("Where a run's time goes", "No quick run on this device says where its time went.")
    spent_s = quick.end.spent_s
    total_s = sum(spent_s.values())
    rows = [
        (
            activity,
            format_number(s),
            _percentage(s / total_s),
            "yes" if activity in evidence.MEASURING else "no",
        )
        for activity, s in sorted(spent_s.items(), key=lambda item: (-item[1], item[0]))
    ]
    return _section(
        "Where a run's time goes",
        f"The activities of the newest quick run on this device, {quick.header.run_id}. What neither "
        f"measures nor builds what is measured is {percent(evidence.outside(spent_s))} of its time.",
        table(("activity", "seconds", "share (%)", "measuring or building"), rows),
    )


def sampler(study: Study) -> list[str]:
    """One kernel with and without the sampling thread."""
    rows = [
        (
            one.kernel,
            format_cell("ours_ns", one.ours_ns),
            format_cell("theirs_ns", one.theirs_ns),
            _signed(one.ratio.median - 1),
            _percentage(one.ratio.relative),
        )
        for one in evidence.sampled(study)
    ]
    if not rows:
        return _section("The sampling thread", f"Not shown: {reasons(study, 'sampler')}.")
    header = ("kernel", "sampled (ms)", "not sampled (ms)", "in-round difference (%)", "± (%)")
    return _section(
        "The sampling thread",
        "One kernel with and without the thread that reads NVML, in the same rounds. Times of a run are "
        "always taken without it.",
        table(header, rows),
    )


def _section(title: str, *parts: str) -> list[str]:
    return [f"### {title}", *parts]


def _missing(study: Study, question: Question) -> list[str]:
    """What could not be read, one line for each."""
    lines = [
        f"- {escape(f'{one.arm} {one.kernel}')}: {escape(one.reason)}"
        for one in study.missing
        if one.question == question
    ]
    return ["\n".join(["Not shown:", "", *dict.fromkeys(lines)])] if lines else []


def _signed(share: float) -> str:
    """A difference as a percentage with its sign, without the unit."""
    return f"{'-' if share < 0 else '+'}{format_number(100 * abs(share))}" if math.isfinite(share) else ABSENT


def _percentage(share: float) -> str:
    """A share as a percentage, without the unit."""
    return format_number(100 * share)
