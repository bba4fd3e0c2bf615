"""The answer at the top of the page: which variant to use on a case, its main numbers, and remarks."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from esbench.report.analysis.quality import MORE_THAN_DENSE
from esbench.report.analysis.ranking import recommended, tied
from esbench.report.web.views import RATE_METRIC, Row, View, better
from esbench.schema import DENSE, Variant
from esbench.stats import LATENCY
from esbench.text import first_names

CONTROLS = (
    *("NoUpdate", "LeakingHook", "MaskMultiply", "Static", "Trained(rule=static"),
    *("CleanSearch(linked", "CleanSearch(reclaim=collect, linked", "CleanSearch(reclaim=iterator, linked"),
)
"""The beginnings of the names of variants that are measured for comparison and never recommended."""
_FEW = 0.5
"""The fastest step is mentioned if it keeps a smaller share of its members."""
_TOO_FEW = re.compile(r"\d+ rounds? of the step: too few for an interval")


class Task(NamedTuple):
    """How to answer for a workload other than a perturbed layer.

    Attributes:
        group: its heading in the list of layers.
        lead: the words before the best variant.
        phase, metric, words: the metric that decides, and its description.
        also: phase, metric and description of more numbers of the best variant.
        method: the method of the metric, empty for any.
    """

    group: str
    lead: str
    phase: str
    metric: str
    words: str
    also: tuple[tuple[str, str, str], ...] = ()
    method: str = ""

    def decides(self, view: View) -> bool:
        """Return whether a view has the metric that decides."""
        is_metric = (view.phase, view.metric) == (self.phase, self.metric)
        return is_metric and self.method in {"", view.method}


_GRADIENTS = ("quality", "live_gradient_bytes", "MB of gradients at most")
_DENSITY = ("quality", "density_percent", "% of the weights in use")
_BACKWARD = Task(
    group="Optimizer inside the backward pass",
    lead="Least gradient memory:",
    phase="quality",
    metric="live_gradient_bytes",
    words="MB of gradients at most",
    also=(("step", "peak_bytes", "MB peak memory of a step"), ("step", LATENCY, "ms a step")),
)
_STEP = Task(
    "Sparse training (RigL)", "Fastest sparse step:", "step", LATENCY, "ms a step", (_GRADIENTS, _DENSITY)
)
_TOPOLOGY = Task(_STEP.group, "Fastest topology update:", "update", LATENCY, "ms an update")
_ACCURACY = Task(
    _STEP.group, "Most accurate sparse network:", "quality", "accuracy", "% of the test digits", (_DENSITY,)
)
_SEARCH = Task(
    group="Architecture search",
    lead="Fastest search that frees its models:",
    phase="step",
    metric=LATENCY,
    words="ms a search",
    also=(
        ("quality", "alive_count", "objects alive after deletion"),
        ("quality", "process_over_largest", "times the largest model's memory"),
    ),
)
_COMPILED = Task(
    group="Architecture search",
    lead="Fastest compiled search:",
    phase="quality",
    metric="candidate_ns",
    words="ms a candidate",
    also=(
        ("quality", "graphs_count", "graphs compiled"),
        ("quality", "compile_ns", "ms of compiling"),
        ("quality", "step_ns", "ms a warm step"),
    ),
)
_DIGITS = Task(
    group="Gradient of a trained network",
    lead="Best gradient:",
    phase="quality",
    metric="effective_members",
    words="effective members, at sigma",
    also=(("quality", "kappa", "kappa"),),
    method="at sigma",
)
TASKS = {
    **dict.fromkeys(("ActivationHeavy", "FewLarge", "ManySmall", "Tied"), _BACKWARD),
    **dict.fromkeys(("SparseMLP", "SparseCNN"), _STEP),
    "TopologyUpdate": _TOPOLOGY,
    "SparseDigits": _ACCURACY,
    "Architectures": _SEARCH,
    "CompiledArchitectures": _COMPILED,
    **dict.fromkeys(("DigitsMLP", "DigitsCNN", "DigitsResNet"), _DIGITS),
}
"""Operator -> its task."""


class Pick(NamedTuple):
    """A recommended variant: its main numbers with their descriptions, and why it is recommended."""

    variant: Variant
    figures: tuple[tuple[str, str], ...]
    why: str = ""


class Answer(NamedTuple):
    """The answer for a case in a run.

    Attributes:
        view: the position of the view that it is read from.
        best: the best variant, and those that are tied with it.
        picks: the figures of the best variant and of the next one, if the two are tied or the first is exact.
    """

    view: int
    lead: str
    best: tuple[Variant, ...] = ()
    picks: tuple[Pick, ...] = ()
    notes: tuple[str, ...] = ()


def answer(views: Sequence[View], trained_with: Callable[[Variant], str]) -> Answer:
    """Return the answer from the views of one case in one run: by rate, by a task's metric, or by time.

    ``trained_with`` returns the accuracies of networks trained with a variant, in % of dense noise's.
    """
    task = TASKS.get(views[0].case.operator)
    index = _deciding_view(views, task)
    view = views[index]
    rows = candidates(view)
    if all(row.variant.baseline for row in view.rows):
        return Answer(index, "No row of a scheme could be read or was measured", notes=(_UNREAD,))
    if not rows:
        return Answer(index, "No variant has a number here: the table gives the reasons")
    if task:
        rows = _fastest_of_equals(views, rows)
    best = rows[0]
    equals = _tied_rows(best, rows, view.metric)
    leaders = recommended(rows) if best.is_exact else [best]
    shown = leaders if best.is_exact else [best, *equals[:1]]
    notes = [note for row in leaders for note in _ties_note(row, _tied_rows(row, rows, view.metric), shown)]
    if view.metric == RATE_METRIC:
        lead, figures = "Use", _rate_figures
        notes += _rate_notes(view, rows)
        notes += [_TRAINED.format(leader.variant.name, trained_with(leader.variant)) for leader in leaders]
    elif task and task.decides(view):
        lead, figures = task.lead, partial(_task_figures, task, views)
        notes += _task_notes(task, view, best)
    elif view.metric != LATENCY:
        lead, figures = f"Best by {view.columns[0]}:", _first_column
    else:
        lead, figures = f"Fastest {view.phase}:", _time_figures
        if any(row.variant.name == DENSE for row in view.rows):
            notes.append(_TIME_ALONE)
    picks = (Pick(row.variant, tuple(figures(view, row)), _why(row, best)) for row in shown)
    return Answer(index, lead, tuple(row.variant for row in (best, *equals)), tuple(picks), tuple(notes))


_UNREAD = "The end of this page, under Runs in this page, lists the lines that could not be read."
_TRAINED = "Accuracy on handwritten digits with {}, in % of dense noise's: {}."
_TIME_ALONE = (
    "n_eff was not measured here. Time alone does not measure the gradient: a fast scheme may waste most of "
    "its members."
)


def _deciding_view(views: Sequence[View], task: Task | None) -> int:
    """Return the position of the view to answer from: the most important one with a candidate."""
    decides = task.decides if task else lambda view: view.metric == RATE_METRIC
    deciding = [index for index, view in enumerate(views) if decides(view)]
    for phase in ("step", "forward", "update", "sample"):
        deciding += [i for i, view in enumerate(views) if (view.phase, view.metric) == (phase, LATENCY)]
    with_candidates = [index for index in deciding if candidates(views[index])]
    return next(iter(with_candidates or deciding), 0)


def candidates(view: View) -> list[Row]:
    """Return the rows with a value, best first, without baselines and controls."""
    batched = (row for row in view.rows if row.variant.mode == "batched" and not row.variant.baseline)
    return [row for row in batched if row.is_known and not is_control(row.variant)]


def is_control(variant: Variant) -> bool:
    """Return whether a variant is measured for comparison only."""
    return variant.name.startswith(CONTROLS)


def _fastest_of_equals(views: Sequence[View], rows: Sequence[Row]) -> list[Row]:
    """Return the rows with the best value first, among them the one with the fastest step."""
    by_time = {row.variant: index for index, row in enumerate(_rows_of(views, "step", LATENCY))}
    best = rows[0].marks.value
    return sorted(rows, key=lambda row: (row.marks.value != best, by_time.get(row.variant, 0)))


def _rows_of(views: Sequence[View], phase: str, metric: str) -> Sequence[Row]:
    """Return the rows of the first view of a phase and metric, best first."""
    return next((view.rows for view in views if (view.phase, view.metric) == (phase, metric)), ())


def _tied_rows(best: Row, rows: Sequence[Row], metric: str) -> list[Row]:
    """Return the other rows whose interval overlaps that of the best."""
    if metric == RATE_METRIC or best.is_exact:
        return tied(best, rows)
    sign = better(metric) or -1
    worst_of_best = min(sign * end for end in best.ends)
    return [row for row in rows if row is not best and max(sign * end for end in row.ends) >= worst_of_best]


def _ties_note(best: Row, equals: Sequence[Row], shown: Sequence[Row]) -> list[str]:
    """Return a sentence that names the tied variants, unless all of them are shown."""
    if all(row in shown for row in equals):
        return []
    names = first_names([row.variant.name for row in equals])
    return [f"Tied with {best.variant.name}: {names}. Their 95 % intervals overlap."]


def _why(row: Row, best: Row) -> str:
    if row.is_exact:
        return "finds the gradient of a linear fitness without error"
    if row is best:
        return ""
    return "best of those that are not exact" if best.is_exact else "tied, its 95 % interval overlaps"


def _rate_figures(view: View, row: Row) -> Iterator[tuple[str, str]]:
    cells = dict(zip(view.columns, row.texts, strict=True))
    if any(shown.variant.name == DENSE for shown in view.rows):
        words = "so no multiple of dense noise" if row.is_exact else "the n_eff per ms of dense noise"
        yield cells["x dense noise"] or "unknown", words
    yield cells["x plain layer"] or "unknown", "the time of the plain layer"
    kept = cells["kept (%)"]
    if row.is_exact:
        yield kept, "all members kept, and more"
    elif kept == MORE_THAN_DENSE:
        yield "100 %", "of the members kept, and more"
    else:
        yield f"{kept} %", "of the members kept"
    yield f"{cells['step (ms)']} ms", f"a step of {view.case.members:,} members"
    if cells["memory (MB)"]:
        yield f"{cells['memory (MB)']} MB", "peak memory"


def _rate_notes(view: View, rows: Sequence[Row]) -> Iterator[str]:
    best, members = rows[0], view.case.members
    reference = next((row for row in view.rows if row.variant.name == DENSE), None)
    if reference and not reference.is_known:
        why = reference.reason.partition(": ")[2]
        yield f"Dense noise, which others are compared with, has no rate here: {why}."
    if too_few := _TOO_FEW.search(best.remark):
        yield f"The time of {best.variant.name} is uncertain: {too_few[0]}."
    fastest = max(rows, key=lambda row: row.marks.evaluated or 0.0)
    rate, evaluated = fastest.marks.value, fastest.marks.evaluated or 0.0
    if rate is not None and rate < _FEW * evaluated:
        cells = dict(zip(view.columns, fastest.texts, strict=True))
        yield (
            f"{fastest.variant.name} has the fastest step, {cells['step (ms)']} ms, but keeps only "
            f"{cells['n_eff']} of its {members:,} members."
        )


def _first_column(view: View, row: Row) -> Iterator[tuple[str, str]]:
    yield row.texts[0], view.columns[0]


def _time_figures(view: View, row: Row) -> Iterator[tuple[str, str]]:
    time, plain, naive, faster, memory, *_ = row.texts
    yield f"{time} ms", f"a {view.phase} of {view.case.members:,} members"
    if faster and row.variant.name != DENSE:
        yield faster, "faster than dense noise"
    if plain:
        base = view.columns[1].removeprefix("x ")
        yield plain, f"the time of {'the plain layer' if base == 'plain layer' else base}"
    if naive:
        yield naive, "faster than one call per member"
    if memory:
        yield f"{memory} MB", "peak memory"


def _task_figures(task: Task, views: Sequence[View], view: View, row: Row) -> Iterator[tuple[str, str]]:
    yield row.texts[0], task.words
    for reference in _references(view):
        yield reference.texts[0], f"{task.words} with {reference.variant.name}"
    for phase, metric, words in task.also:
        for measured in _rows_of(views, phase, metric):
            if measured.variant == row.variant and measured.is_known:
                yield measured.texts[0], words


def _references(view: View) -> list[Row]:
    """Return the row of the baseline that a task is compared with, or an empty list."""
    plain = (row for row in view.rows if row.variant.mode != "batched")
    known = [row for row in plain if row.is_known and not is_control(row.variant)]
    return sorted(known, key=lambda row: row.variant.mode)[:1]  # base before naive


def _task_notes(task: Task, view: View, best: Row) -> Iterator[str]:
    sign = better(view.metric)
    for row in _references(view):
        if sign * (row.marks.value or 0.0) > sign * (best.marks.value or 0.0):
            yield f"{row.variant.name} is better than all of them: {row.texts[0]} {task.words}."
    if controls := [row.variant.name for row in view.rows if is_control(row.variant)]:
        yield f"For comparison only: {first_names(controls)}."
