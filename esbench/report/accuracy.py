"""The page on how accurate the harness is: a pure function of the stored studies and runs."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from esbench.report import evidence, exhibits
from esbench.report.formats import Style, write_document
from esbench.report.goals import goals, missed, percent
from esbench.report.passages import Document, table
from esbench.report.text import escape
from esbench.schema import Run
from esbench.store import read_results
from esbench.studies.timer_accuracy import Study, newest_studies
from esbench.units import format_number

PAGE = "accuracy"

_INTRODUCTION = (
    "Written by `nox -s accuracy` from the newest study of each device under `results/<device>/accuracy/`. A "
    "goal that is missed is shown as missed: nothing here is a gate."
)

_COMMIT_DIGITS = 7


def render_accuracy(
    results: Path, out: Path, measured: Sequence[Run] | None = None, style: Style | None = None
) -> list[Path]:
    """Write ``<out>/accuracy.md``, or the page in another format, from the newest study of each device.

    Nothing where there is none. The same results give the same bytes. ``measured`` are the runs under
    ``results``, where they have been read already.

    Raises:
        UserError: a study cannot be read.

    """
    studies = newest_studies(results)
    if not studies:
        return []
    runs = read_results(results)[0] if measured is None else measured
    return [write_document(out / PAGE, accuracy_page(studies, runs), style or Style())]


def accuracy_page(studies: Sequence[Study], runs: Sequence[Run]) -> Document:
    """Return the page: for each study its machine, its verdicts and a table for each question."""
    parts = ["# How accurate the harness is", _INTRODUCTION]
    for study in studies:
        parts += _study(study, evidence.newest_quick_run(study, runs))
    return Document(parts)


def _study(study: Study, quick: Run | None) -> list[str]:
    found = goals(study, quick)
    return [
        f"## {escape(study.environment.device_name)}",
        _machine(study),
        table(("goal", "found", "verdict"), [(goal.goal, goal.found, goal.verdict) for goal in found]),
        *([_noise(study, len(missed(found)), len(found))] if missed(found) else []),
        *exhibits.agreement(study),
        *exhibits.twins(study),
        *exhibits.lengths(study),
        *exhibits.replicates(study),
        *exhibits.spent(quick),
        *exhibits.sampler(study),
    ]


def _machine(study: Study) -> str:
    here = study.environment
    commit = f"commit {here.commit[:_COMMIT_DIGITS]}" if here.commit else "commit unknown"
    versions = {"CUDA": here.cuda, "driver": here.driver, "triton": here.triton}
    words = [
        f"Study {study.study_id}, begun {study.started}",
        f"{here.threads} threads on {escape(here.cpu)}",
        commit + (" with uncommitted changes" if here.dirty else ""),
        f"esbench {here.esbench}, torch {here.torch}, Python {here.python}",
        *(f"{name} {version}" for name, version in versions.items() if version),
        f"load average {format_number(here.load)} before and {format_number(study.load_after)} after",
        f"it took {format_number(study.wall_s)} s",
    ]
    return "; ".join(words) + "."


def _noise(study: Study, count: int, total: int) -> str:
    """What the machine itself adds, beside the goals that were missed."""
    text = f"{count} of {total} goals are not met here."
    every = evidence.twins(study, "twins")
    if every:
        text += (
            " How quiet the machine was shows in one call under two names: half of the middle 60 % of its "
            f"ratios is ±{percent(median(one.half_range for one in every))} (median over kernels) and "
            f"±{percent(max(one.half_range for one in every))} for the worst kernel."
        )
    if study.environment.device == "cpu":
        text += (
            f" A CPU with {study.environment.threads} threads shares its cores with every other program, and "
            "a virtual machine its processor with others: a goal missed by less than that spread says "
            "nothing of the harness."
        )
    return text
