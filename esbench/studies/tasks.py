"""Records and page of the study of tasks: the time in which a network reaches a goal with each variant.

A study is one JSON file, ``<results>/<device>/tasks/<study id>.json``, which is rewritten after every
training run. Nothing here imports torch.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

from esbench import stats
from esbench.report.formats import write
from esbench.report.formats.markdown import image, join, table
from esbench.schema import Positive, Sample, Strict, Task, Variant
from esbench.studies import StoredStudy, StudyFiles, origin
from esbench.studies.digits import DENSE, Untrained, reasons
from esbench.text import escape, pluralize
from esbench.units import ABSENT, format_multiplier, format_number

PAGE = "tasks.md"
VARIANTS = (
    DENSE.name,
    "LowRank(rank=1)",
    "Hadamard",
    "SparsePerturbed(k=1)",
    "Permuted",
    "Flipped(side=both)",
)
"""The variants of a study, unless others are named."""
IN_A_ROW = 2
"""Tests in a row that have to reach the goal."""


class Learning(Strict, frozen=True, kw_only=True):
    """A training run of a task; the tests are before the first and after every ``task.every`` steps."""

    variant: Variant
    task: str
    seed: int
    scores: tuple[float, ...]
    wall_s: float


class StepTime(Strict, frozen=True, kw_only=True):
    """The nanoseconds of the training steps of a variant on a task, for each round, and its n_eff.

    All variants of a task were timed in the same rounds.
    """

    variant: Variant
    task: str
    rounds: Annotated[tuple[tuple[Sample, ...], ...], msgspec.Meta(min_length=1)]
    effective_members: Positive | None = None

    @property
    def milliseconds(self) -> float:
        """The median over rounds of the median of a round, in ms."""
        return median(map(median, self.rounds)) / 1e6


class Study(StoredStudy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All finished training runs of a study, the times of steps, and their environment.

    ``code``: name -> hash of the source of each variant and of its package.
    """

    tasks: Annotated[tuple[Task, ...], msgspec.Meta(min_length=1)]
    seeds: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    variants: tuple[Variant, ...]
    code: dict[str, str] = msgspec.field(default_factory=dict)
    learnings: tuple[Learning, ...] = ()
    untrained: tuple[Untrained, ...] = ()
    times: tuple[StepTime, ...] = ()

    def remaining_runs(self) -> list[tuple[int, Task, Variant]]:
        """Return the remaining training runs: all variants with the first seed, then with the next."""
        done = {(run.seed, run.task, run.variant) for run in self.learnings}
        return [
            (seed, task, variant)
            for seed, task, variant in itertools.product(self.seeds, self.tasks, self.variants)
            if (seed, task.name, variant) not in done and variant in self.trainable(task)
        ]

    @property
    def is_complete(self) -> bool:
        """Whether nothing remains to be trained or timed."""
        return not self.remaining_runs() and not self.untimed()

    def untimed(self) -> list[Task]:
        """Return the tasks whose steps remain to be timed."""
        timed = {(time.task, time.variant) for time in self.times}
        return [
            task
            for task in self.tasks
            if any((task.name, variant) not in timed for variant in self.trainable(task))
        ]

    def trainable(self, task: Task) -> list[Variant]:
        """Return the variants that have not failed on a task."""
        failed = {failure.variant for failure in self.untrained if failure.network == task.name}
        return [variant for variant in self.variants if variant not in failed]


FILES = StudyFiles(Study, 1, "tasks", "study of tasks", again="train again")


# Results


def steps_to_goal(task: Task, scores: Sequence[float]) -> float:
    """Return the steps before the first of IN_A_ROW tests that reach the goal, infinite if there are none."""
    reached = [task.reached(score) for score in scores]
    for index in range(len(reached) - IN_A_ROW + 1):
        if all(reached[index : index + IN_A_ROW]):
            return index * task.every
    return math.inf


class Result(NamedTuple):
    """How a variant learns a task.

    Attributes:
        variant: the variant.
        steps: the steps to the goal of each training run, infinite if it is not reached.
        time: the times of its steps and its n_eff; None if they were not measured.
    """

    variant: Variant
    steps: Sequence[float]
    time: StepTime | None

    @property
    def seconds(self) -> float | None:
        """The median steps to the goal times the time of a step; infinite without the goal."""
        if self.time is None:
            return None
        return median(self.steps) * self.time.milliseconds / 1e3

    @property
    def rate(self) -> float | None:
        """n_eff per ms."""
        if self.time is None or self.time.effective_members is None:
            return None
        return self.time.effective_members / self.time.milliseconds


def results_of(study: Study, task: Task) -> list[Result]:
    """Return the result of each variant that has learned a task."""
    times = {time.variant: time for time in study.times if time.task == task.name}
    results = []
    for variant in study.variants:
        runs = [run for run in study.learnings if (run.task, run.variant) == (task.name, variant)]
        if runs:
            steps = [steps_to_goal(task, run.scores) for run in runs]
            results.append(Result(variant, steps, times.get(variant)))
    return results


class Correlation(NamedTuple):
    """Rank correlations over variants with two-sided p values: of n_eff and evaluations, of rate and time."""

    evaluations: tuple[float, float] | None
    time: tuple[float, float] | None


def correlation(results: Sequence[Result]) -> Correlation:
    """Return how well n_eff ranks variants by evaluations to the goal, and n_eff per ms by time to the goal.

    It is 1 if the larger n_eff, or n_eff per ms, always has fewer evaluations, or less time.
    """
    known = [(result, result.time, result.rate) for result in results if result.time and result.rate]
    sizes = [time.effective_members or math.nan for _, time, _ in known]
    return Correlation(
        stats.rank_correlation(sizes, [-median(result.steps) for result, _, _ in known]),
        stats.rank_correlation(
            [rate for *_, rate in known], [-(result.seconds or 0.0) for result, *_ in known]
        ),
    )


def finding(study: Study, task: Task) -> str:
    """Return the result of a task in a sentence."""
    results = results_of(study, task)
    runs = [step for result in results for step in result.steps]
    count = sum(map(math.isfinite, runs))
    text = f"{task.name}: {count} of {pluralize(len(runs), 'training run')} reached {_goal(task)}"
    rho = correlation(results).time
    return text if rho is None else f"{text}; rank correlation of n_eff per ms and speed {_rho(rho)}"


def disagreement(results: Sequence[Result]) -> str:
    """Return where n_eff per ms and the time to the goal, both relative to dense noise, differ most."""
    shares = [
        (abs(math.log(measured / predicted)), result, predicted, measured)
        for result in results
        if (predicted := _predicted(result, results)) and (measured := _measured(result, results))
    ]
    distance, result, predicted, measured = max(
        shares, key=lambda share: share[0], default=(0.0, None, 1.0, 1.0)
    )
    if not result or not distance:  # dense noise alone agrees with itself
        return ""
    more = format_multiplier(measured / predicted)
    return (
        f"Prediction and time differ most for {escape(result.variant.name)}: by n_eff per ms it takes "
        f"{format_multiplier(predicted)} dense noise's time, and it took {format_multiplier(measured)}, "
        f"because it needed {more} the evaluations that would be proportional to 1 / n_eff."
    )


def _predicted(result: Result, results: Sequence[Result]) -> float | None:
    """Return the time to the goal relative to dense noise's by n_eff per ms."""
    dense = next((other.rate for other in results if other.variant == DENSE), None)
    return dense / result.rate if dense and result.rate else None


def _measured(result: Result, results: Sequence[Result]) -> float | None:
    """Return the measured time to the goal relative to dense noise's; None without a goal reached by both."""
    dense = next((other.seconds for other in results if other.variant == DENSE), None)
    seconds = result.seconds
    if not dense or not seconds or not math.isfinite(dense) or not math.isfinite(seconds):
        return None
    return seconds / dense


def _rho(value: tuple[float, float]) -> str:
    rho, p = value
    return f"{rho:.2f} (p = {p:.2g})"


def _goal(task: Task) -> str:
    return f"{task.score} {'≥' if task.rises else '≤'} {task.goal:g}"


# The page


_INTRODUCTION = f"""\
Written by `nox -s tasks` from the newest study of each device under `results/<device>/tasks/`: does the
variant with the largest n_eff per ms learn fastest? `docs/tasks.md` says how it is measured.

- All variants learn a task with the same network, members, batches, sigma and learning rate, which were
  **tuned for dense noise only**; the learning rate falls to zero as a cosine. An evaluation is one member
  on one side of its pair, on a whole batch.
- **To the goal**: until the first of {IN_A_ROW} tests in a row that reach it; the median over seeds, and the
  range.
- **ms a step** is measured before training, all variants of a task in the same rounds, on one thread.
  **Time to the goal** is the median number of steps times it, without tests.
- **n_eff** of the pairs is n / (1 + kappa n / d). kappa has a closed form for each parameter, weighted by
  the squared gradient: the dot product of two independent estimates by dense noise at the initial weights,
  because rewards have no derivative.
- **By n_eff per ms**: time / dense, if the evaluations to the goal were proportional to 1 / n_eff. Both
  have the same ms a step, so they differ only in the evaluations.
- **Rank correlation**: Spearman's, over the variants; p is two-sided, from all permutations."""


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/tasks.md`` and its plots from the newest study of each device; nothing without a study.

    Raises:
        UserError: a study cannot be read.
    """
    studies = [study for study in FILES.newest(results) if study.learnings]
    if not studies:
        return []
    pictures = {study.study_id: _pictures(study, out) for study in studies}
    drawn = [path for paths in pictures.values() for path, _ in paths]
    return [write(out / PAGE, page(studies, pictures)), *drawn]


def page(studies: Sequence[Study], pictures: dict[str, list[tuple[Path, str]]]) -> str:
    """Return the page as Markdown; ``pictures`` has the plots and their titles by the id of the study."""
    parts = ["# Time to a goal", _INTRODUCTION]
    for study in studies:
        here, wall_s = study.environment, sum(run.wall_s for run in study.learnings)
        facts = [pluralize(len(study.seeds), "seed"), f"training took {format_number(wall_s)} s of one core"]
        parts += [f"## {escape(here.device_name)}", origin(study.study_id, study.started, here, facts)]
        parts += [image(path.name, title) for path, title in pictures[study.study_id]]
        for task in study.tasks:
            results = results_of(study, task)
            rho = correlation(results)
            parts += [f"### {task.name}", f"{_describe(task)} {escape(finding(study, task))}."]
            parts.append(_table(task, results))
            if rho.evaluations:
                sizes = f"Rank correlation of n_eff and 1 / evaluations {_rho(rho.evaluations)}."
                parts.append(f"{sizes} {disagreement(results)}")
            if listed := [f"- {escape(reason)}" for reason in reasons(study.untrained, task.name)]:
                parts.append("\n".join(["Not trained:", "", *listed]))
            if missing := sum(remaining == task for _, remaining, _ in study.remaining_runs()):
                parts.append(f"Incomplete: {pluralize(missing, 'training run')} missing.")
    return join(part.rstrip() for part in parts)


def _describe(task: Task) -> str:
    goal = f"The goal is {_goal(task)}."
    return (
        f"{task.tests[0].upper()}{task.tests[1:]}. {task.members} antithetic pairs, batches of {task.batch}, "
        f"sigma {task.sigma:g}, Adam from {task.learning_rate:g}, at most {task.steps} steps of "
        f"{task.evaluations} evaluations, a test every {pluralize(task.every, 'step')}. {goal}"
    )


def _table(task: Task, results: Sequence[Result]) -> str:
    header = (
        *("variant", "goal reached", "evaluations to the goal", "range", "ms a step", "time to the goal (s)"),
        *(f"n_eff of {task.members}", "n_eff per ms", "time / dense", "by n_eff per ms"),
    )
    rows = []
    for result in results:
        measured, predicted = _measured(result, results), _predicted(result, results)
        evaluations = [step * task.evaluations for step in sorted(result.steps)]
        time = result.time
        rows.append(
            (
                result.variant.name,
                f"{sum(map(math.isfinite, result.steps))} of {len(result.steps)}",
                _count(median(evaluations)),
                f"{_count(evaluations[0])} - {_count(evaluations[-1])}",
                format_number(time.milliseconds if time else None),
                _number(result.seconds),
                format_number(time.effective_members if time else None),
                format_number(result.rate),
                ABSENT if measured is None else format_multiplier(measured),
                ABSENT if predicted is None else format_multiplier(predicted),
            )
        )
    return table(header, rows)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "not reached"


def _number(value: float | None) -> str:
    return format_number(value) if value is None or math.isfinite(value) else "not reached"


def _pictures(study: Study, out: Path) -> list[tuple[Path, str]]:
    """Draw times to the goal and learning curves; return the files with their titles."""
    from esbench.report.plots.tasks import learning_curves, times_to_goal  # noqa: PLC0415  # matplotlib is slow

    here = study.environment
    source = f"{here.device_name}, {pluralize(len(study.seeds), 'seed')}, study {study.study_id}"
    points = {
        task.name: [
            (result.variant.name, result.rate, result.seconds)
            for result in results_of(study, task)
            if result.rate and result.seconds and math.isfinite(result.seconds)
        ]
        for task in study.tasks
    }
    rhos = {task.name: correlation(results_of(study, task)).time for task in study.tasks}
    known = ", ".join(f"{name} {_rho(rho)}" for name, rho in rhos.items() if rho)
    figures = []
    if any(points.values()):
        title = f"Time to the goal against n_eff per ms; rank correlation with speed: {known or 'unknown'}"
        figures.append((times_to_goal(points, title, source), "", title))
    title = "Scores while learning, medians and ranges over seeds"
    learned = {run.task for run in study.learnings}
    curves = [(task, _curves(study, task)) for task in study.tasks if task.name in learned]
    figures.append((learning_curves(curves, title, source), "-curves", title))
    return [(figure.write(out / f"tasks{name}-{here.slug}.svg"), title) for figure, name, title in figures]


def _curves(study: Study, task: Task) -> dict[str, list[tuple[float, float, float, float]]]:
    """Return for each variant (evaluations, median, lowest, highest score over seeds).

    A training run that has ended counts with its last score.
    """
    curves = {}
    for variant in study.trainable(task):
        runs = [run.scores for run in study.learnings if (run.task, run.variant) == (task.name, variant)]
        longest = max(map(len, runs), default=0)
        tests = [[scores[min(index, len(scores) - 1)] for scores in runs] for index in range(longest)]
        curves[variant.name] = [
            (float(index * task.every * task.evaluations), median(scores), min(scores), max(scores))
            for index, scores in enumerate(tests)
        ]
    return curves
