"""Records and page of the scaling study: training steps of a population that is split over ranks.

A study is one JSON file, ``<results>/<device>/scaling/<study id>.json``. Nothing here imports torch.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

from esbench import stats
from esbench.report.formats import write
from esbench.report.formats.markdown import image, join, table
from esbench.schema import Count, Positive, Recipe, Sample, Strict, Variant
from esbench.studies import StoredStudy, StudyFiles, origin
from esbench.text import escape
from esbench.units import ABSENT, format_cell, format_number, format_value

PAGE = "scaling.md"
GPUS = (2, 4, 8, 16, 32, 64)
"""Numbers of GPUs that the model of communication is evaluated for."""
PARAMETERS = (10**6, 10**8, 10**9)
"""Numbers of parameters that it is evaluated for, besides those of the measured network."""
KEPT = 0.9
"""The efficiency for which the page gives the shortest step."""
STRONG, WEAK = "strong", "weak"

Rounds = Annotated[
    tuple[Annotated[tuple[Sample, ...], msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)
]
"""The nanoseconds of each step, for each round."""


class Cell(Strict, frozen=True, kw_only=True):
    """The steps of some ranks that share a population.

    Attributes:
        ranks: the number of ranks.
        members: antithetic pairs of the whole population.
        steps: the time of each step, of the slowest rank.
        waits: the time of each step in collectives, of the rank that waits least: the last one to arrive.
        collectives: bytes of the tensor of each collective of a step, counted at the call.
    """

    ranks: Count
    members: Count
    steps: Rounds
    waits: Rounds
    collectives: tuple[Count, ...]


class Link(Strict, frozen=True, kw_only=True):
    """What the model of communication assumes of the connection of two GPUs."""

    bytes_per_s: Positive
    latency_s: Positive

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """Return the seconds of an all-reduce: 2 log2(p) latencies and 2 (p - 1) / p times the bytes.

        That is Rabenseifner's algorithm without its additions (Thakur, Rabenseifner and Gropp 2005,
        doi:10.1177/1094342005051521).
        """
        share = (ranks - 1) / ranks
        return 2 * math.log2(ranks) * self.latency_s + 2 * share * size_bytes / self.bytes_per_s


class Study(StoredStudy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All cells of a study and their environment.

    ``recipe`` has the network, and the antithetic pairs of strong scaling; ``parameters`` is d;
    ``processors`` is the number of CPUs or GPUs, each for one rank at a time.
    """

    wall_s: float
    variant: Variant
    recipe: Recipe
    parameters: Count
    processors: Count
    link: Link
    cells: Annotated[tuple[Cell, ...], msgspec.Meta(min_length=1)]

    @property
    def share(self) -> int:
        """Antithetic pairs a rank of weak scaling, and of strong scaling on the most ranks."""
        return self.recipe.members // max(cell.ranks for cell in self.cells)


FILES = StudyFiles(Study, 1, "scaling", "scaling study", again="measure again")


def sizes(members: int, ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return (ranks, members) of each cell: all members on each number of ranks, and a constant share a rank.

    The share is that of strong scaling on the most ranks, where both kinds have a cell in common.
    """
    counts = sorted(set(ranks))
    share = members // counts[-1]
    return list(dict.fromkeys([(count, size) for count in counts for size in (members, share * count)]))


def step_bytes(members: int, parameters: int, ranks: int) -> tuple[int, int]:
    """Return the bytes of both all-reduces of a step by the model: fitness of both sides, and the gradient.

    The fitness is float64, with a number more for each rank, its step; the gradient is float32.
    """
    return 8 * (2 * members + ranks), 4 * parameters


class Point(NamedTuple):
    """A cell as a point of strong or weak scaling.

    Attributes:
        kind: STRONG or WEAK.
        cell: its steps.
        efficiency: the median over rounds of the ideal step time / the step time; None without one rank.
        half: half the 95 % interval of the efficiency; None for too few rounds.
    """

    kind: str
    cell: Cell
    efficiency: float | None
    half: float | None


def points(study: Study) -> list[Point]:
    """Return all points, first those of strong scaling, by the number of ranks."""
    by_size = {(cell.ranks, cell.members): cell for cell in study.cells}
    result = []
    for kind in (STRONG, WEAK):
        for ranks in sorted({cell.ranks for cell in study.cells}):
            size = study.recipe.members if kind == STRONG else study.share * ranks
            size_of_one = study.recipe.members if kind == STRONG else study.share
            result.append(_point(kind, by_size[ranks, size], by_size.get((1, size_of_one))))
    return result


def _point(kind: str, cell: Cell, one: Cell | None) -> Point:
    if one is None:
        return Point(kind, cell, None, None)
    work = cell.ranks if kind == STRONG else 1
    ratios = [
        median(alone) / median(shared) / work for alone, shared in zip(one.steps, cell.steps, strict=True)
    ]
    interval = stats.interval(ratios)
    half = (interval.high - interval.low) / 2 if interval and cell is not one else None
    return Point(kind, cell, median(ratios), half)


def finding(study: Study) -> str:
    """Return the result of a study in a sentence."""
    own = [point for point in points(study) if 1 < point.cell.ranks <= study.processors and point.efficiency]
    if not own:
        return "No two ranks had a processor each: parallel efficiency was not measured"
    most = max(point.cell.ranks for point in own)
    kept = " and ".join(
        f"{format_number(100 * point.efficiency)} % ({point.kind})"
        for point in own
        if point.cell.ranks == most and point.efficiency
    )
    return f"{most} ranks on {study.processors} {_processors(study)} keep {kept} of the ideal speed"


def _processors(study: Study) -> str:
    return "CPUs" if study.environment.device == "cpu" else "GPUs"


def step_s(study: Study, parameters: int, gpus: int) -> float:
    """Return the seconds of a step's communication by the model, with as many members a GPU as a rank had."""
    sizes_of_step = step_bytes(study.share * gpus, parameters, gpus)
    return sum(study.link.all_reduce_s(size, gpus) for size in sizes_of_step)


# The page


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/scaling.md`` and its plots from the newest study of each device; nothing without a study.

    Raises:
        UserError: a study cannot be read.
    """
    studies = FILES.newest(results)
    if not studies:
        return []
    pictures = [_picture(study, out) for study in studies]
    return [write(out / PAGE, page(studies, [path.name for path in pictures])), *pictures]


_INTRODUCTION = f"""\
Written by `nox -s scaling` from the newest study of each device under `results/<device>/scaling/`: training
steps of a population that `impls.shard` splits over processes, with one thread a rank. `docs/scaling.md` says
how they are measured and what the model of communication assumes.

- **Strong** scaling: the same members on more ranks; ideal is the time of one rank / ranks. **Weak**: the
  same members a rank; ideal is the time of one rank. Efficiency is the ideal time / the step time, the median
  of ratios within a round; ± is half its 95 % interval.
- **Collectives**: the time of a step in the two all-reduces, of the rank that waits least.
- **Bytes**: of the tensors that both all-reduces of a step get on each rank, counted at the call; by the
  model 8 (2 n + ranks) for the fitness of n antithetic pairs, and 4 d for the gradient.
- **{KEPT:.0%} from**: the shortest step of a GPU's own work that keeps an efficiency of {KEPT:.0%} by the
  model."""


def page(studies: Sequence[Study], pictures: Sequence[str]) -> str:
    """Return the page as Markdown; ``pictures`` are the files of the plots, one for each study."""
    parts = ["# Scaling over ranks", _INTRODUCTION]
    for study, picture in zip(studies, pictures, strict=True):
        here, recipe = study.environment, study.recipe
        what = (
            f"{escape(study.variant.name)} on {escape(recipe.network)}, d = {study.parameters:,} parameters, "
            f"batches of {recipe.batch}. {finding(study)}."
        )
        assumed = (
            f"{format_value('bytes_per_s', study.link.bytes_per_s)} and {1e6 * study.link.latency_s:g} µs "
            f"between any two GPUs, {study.share} antithetic pairs a GPU; nothing is computed meanwhile."
        )
        facts = [f"load average {format_number(here.load)} before", f"{format_number(study.wall_s)} s"]
        parts += [
            f"## {escape(here.device_name)}",
            origin(study.study_id, study.started, here, facts),
            image(picture, finding(study)),
            what,
            _measured_table(study),
            "### On GPUs, by the model",
            assumed,
            _model_table(study),
        ]
    return join(parts)


def _measured_table(study: Study) -> str:
    header = (
        *("scaling", "ranks", "pairs", "step (ms)", "efficiency (%)", "± (%)", "collectives (ms)"),
        *("bytes", "bytes by the model", "note"),
    )
    rows = []
    for kind, cell, efficiency, half in points(study):
        by_model = sum(step_bytes(cell.members, study.parameters, cell.ranks)) if cell.ranks > 1 else 0
        rows.append(
            (
                *(kind, cell.ranks, cell.members, format_cell("_ns", _median(cell.steps))),
                ABSENT if efficiency is None else format_number(100 * efficiency),
                ABSENT if half is None else format_number(100 * half),
                format_cell("_ns", _median(cell.waits)),
                *(f"{sum(cell.collectives):,}", f"{by_model:,}"),
                f"ranks share {_processors(study)}" if cell.ranks > study.processors else "",
            )
        )
    return table(header, rows)


def _median(rounds: Rounds) -> float:
    return median([median(steps) for steps in rounds])


def _model_table(study: Study) -> str:
    header = (
        *("parameters", "bytes a step on 64", "8 GPUs (ms)", "64 GPUs (ms)"),
        f"{KEPT:.0%} from, on 64 (ms)",
    )
    members = study.share * GPUS[-1]
    rows = [
        (
            f"{parameters:,}",
            f"{sum(step_bytes(members, parameters, GPUS[-1])):,}",
            *(format_number(1e3 * step_s(study, parameters, gpus)) for gpus in (8, GPUS[-1])),
            format_number(1e3 * KEPT / (1 - KEPT) * step_s(study, parameters, GPUS[-1])),
        )
        for parameters in (study.parameters, *PARAMETERS)
    ]
    return table(header, rows)


def _picture(study: Study, out: Path) -> Path:
    """Draw efficiency and model; return the file."""
    from esbench.report.plots.scaling import scaling  # noqa: PLC0415  # matplotlib is slow to import

    efficiencies = {
        kind: [
            (point.cell.ranks, 100 * point.efficiency, None if point.half is None else 100 * point.half)
            for point in points(study)
            if point.kind == kind and point.efficiency is not None
        ]
        for kind in (STRONG, WEAK)
    }
    model = {
        f"{parameters:,} parameters": [(gpus, 1e3 * step_s(study, parameters, gpus)) for gpus in GPUS]
        for parameters in (study.parameters, *PARAMETERS)
    }
    here = study.environment
    figure = scaling(
        efficiencies,
        model,
        (study.processors, _processors(study)),
        finding(study),
        f"{here.device_name}, {study.variant.name} on {study.recipe.network}, study {study.study_id}",
    )
    return figure.write(out / f"scaling-{here.slug}.svg")
