"""Records and page of the digits study: how well a small network learns with each variant.

A study is one JSON file, ``<results>/<device>/digits/<study id>.json``, which is rewritten after every
training run. Nothing here imports torch.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from esbench.errors import UserError
from esbench.report.analysis.quality import Estimate, estimate
from esbench.report.formats import write
from esbench.report.formats.markdown import NOT_MET, join, table
from esbench.schema import Outcome, Recipe, Strict, Variant
from esbench.studies import StoredStudy, StudyFiles, newest_files, origin
from esbench.text import escape, one_line, pluralize
from esbench.units import ABSENT, format_number

PAGE = "digits.md"
DENSE = Variant(scheme="Perturbed")
"""Independent Gaussian noise for every weight: the reference of every other variant."""
NETWORKS = ("DigitsMLP", "DigitsCNN", "DigitsResNet")
"""The networks of a complete page; it names those that a study does not have."""
GOAL = 0.95
"""The share of the accuracy of dense noise that an unbiased variant should reach."""

_INTRODUCTION = (
    "Written by `nox -s digits` from the newest study of each device under `results/<device>/digits/`. "
    "Every variant trains the same network from the same weights on the same batches of scikit-learn's "
    "digits, with the same members, steps, sigma and learning rate, which were tuned for dense noise. A "
    "variant is unbiased if the entries of its perturbations are uncorrelated and have variance 1; its "
    f"goal is {GOAL:.0%} of the accuracy of dense noise. A missed goal is reported and fails nothing. "
    "Dropout is biased: its strength depends on the drop probability and not on sigma. "
    "DropoutMask(side=out) and DropoutBlocks(side=both) learn from single rows and stay near chance "
    "here, where a member has one utility per batch; `examples/dropout_only.py` trains them with one "
    "image per member. n_eff is computed from the closed form of kappa and the gradient before training; "
    "± is half the 95 % interval of the mean over seeds by Student's t."
)


class TrainingRun(Strict, frozen=True, kw_only=True):
    """One training run of a network with a variant and a seed."""

    variant: Variant
    network: str
    seed: int
    outcome: Outcome
    wall_s: float


class Untrained(Strict, frozen=True, kw_only=True):
    """A variant that could not be trained; ``failed`` unless the scheme does not support the network."""

    variant: Variant
    network: str
    reason: str
    failed: bool = False


class Study(StoredStudy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All finished training runs of a study and their environment.

    ``code``: name -> hash of the source of each variant and of its package.
    """

    recipes: Annotated[tuple[Recipe, ...], msgspec.Meta(min_length=1)]
    seeds: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    variants: tuple[Variant, ...]
    code: dict[str, str] = msgspec.field(default_factory=dict)
    training_runs: tuple[TrainingRun, ...] = msgspec.field(default=(), name="trainings")
    untrained: tuple[Untrained, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether nothing remains to be trained."""
        return not self.remaining_runs()

    def remaining_runs(self) -> list[tuple[int, Recipe, Variant]]:
        """Return the remaining training runs: all variants with the first seed, then with the next."""
        done = {(run.seed, run.network, run.variant) for run in self.training_runs}
        failed = {(failure.network, failure.variant) for failure in self.untrained}
        return [
            (seed, recipe, variant)
            for seed, recipe, variant in itertools.product(self.seeds, self.recipes, self.variants)
            if (seed, recipe.network, variant) not in done and (recipe.network, variant) not in failed
        ]


FILES = StudyFiles(Study, 1, "digits", "digits study", again="train again")


def trained_with(results: Path, variant: Variant) -> str:
    """Return the accuracies that networks of the stored studies reach with a variant, in % of dense noise's.

    Invalid studies are left out: the page of the studies reports them.
    """
    shares: dict[str, float] = {}
    for path in newest_files(results, FILES.folder):
        try:
            study = FILES.read(path)
        except UserError:
            continue
        for recipe in study.recipes:
            for result in results_of(study, recipe.network):
                if result.variant == variant and result.share is not None:
                    shares.setdefault(recipe.network, result.share)
    if not shares:
        return "not tried"
    return ", ".join(f"{format_number(100 * share)} ({network})" for network, share in shares.items())


# The page


class Result(NamedTuple):
    """The result of one variant on one network; ``share`` is relative to the accuracy of dense noise."""

    variant: Variant
    accuracy: Estimate
    share: float | None
    outcome: Outcome

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty if there is no goal."""
        if not self.outcome.unbiased or self.variant == DENSE:
            return ""
        if self.share is None:
            return "not shown"
        return "met" if self.share >= GOAL else NOT_MET


def results_of(study: Study, network: str) -> list[Result]:
    """Return the result of each variant that was trained on a network."""
    outcomes = defaultdict[Variant, list[Outcome]](list)
    for run in study.training_runs:
        if run.network == network:
            outcomes[run.variant].append(run.outcome)
    accuracies = {
        variant: accuracy
        for variant, outcomes_of_variant in outcomes.items()
        if (accuracy := estimate([outcome.accuracy for outcome in outcomes_of_variant]))
    }
    dense = accuracies[DENSE].mean if DENSE in accuracies else None
    return [
        Result(variant, accuracy, accuracy.mean / dense if dense else None, outcomes[variant][0])
        for variant, accuracy in accuracies.items()
    ]


def verdict(study: Study, network: str) -> str:
    """Return how many unbiased variants reach the goal on a network, and which do not."""
    judged = [result for result in results_of(study, network) if result.verdict in {"met", NOT_MET}]
    missed = [result.variant.name for result in judged if result.verdict == NOT_MET]
    count = f"{len(judged) - len(missed)} of {len(judged)} unbiased variants"
    text = f"{network}: {count} reach {GOAL:.0%} of dense noise's accuracy"
    return f"{text}; not {', '.join(missed)}" if missed else text


def reasons(untrained: Sequence[Untrained], network: str) -> list[str]:
    """Return one line per variant that could not be trained on a network or task, with the reason."""
    return [
        f"{failure.variant.name}{' failed' if failure.failed else ''}: {one_line(failure.reason)}"
        for failure in untrained
        if failure.network == network
    ]


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/digits.md`` from the newest study of each device; nothing if there is no study.

    Raises:
        UserError: a study cannot be read.
    """
    studies = [study for study in FILES.newest(results) if study.training_runs]
    return [write(out / PAGE, page(studies))] if studies else []


def page(studies: Sequence[Study]) -> str:
    """Return the page as Markdown."""
    parts = ["# Learning digits with every variant", _INTRODUCTION]
    for study in studies:
        here, wall_s = study.environment, sum(run.wall_s for run in study.training_runs)
        facts = [f"{len(study.seeds)} seeds", f"training took {format_number(wall_s)} s"]
        parts += [f"## {escape(here.device_name)}", origin(study.study_id, study.started, here, facts)]
        for recipe in study.recipes:
            parts += [f"### {recipe.network}"]
            parts += [f"{_describe(recipe)} {escape(verdict(study, recipe.network))}.", _table(study, recipe)]
            if listed := [f"- {escape(reason)}" for reason in reasons(study.untrained, recipe.network)]:
                parts.append("\n".join(["Not trained:", "", *listed]))
            missing = sum(remaining_recipe == recipe for _, remaining_recipe, _ in study.remaining_runs())
            if missing:
                parts.append(f"Incomplete: {pluralize(missing, 'training run')} missing.")
        measured = {recipe.network for recipe in study.recipes}
        if unmeasured := [name for name in NETWORKS if name not in measured]:
            parts.append(
                f"Not measured: {', '.join(unmeasured)}; `esbench digits --network NAME` trains a network."
            )
    return join(parts)


def _describe(recipe: Recipe) -> str:
    return (
        f"{recipe.members} antithetic pairs, {recipe.steps} steps, batches of {recipe.batch}, sigma "
        f"{recipe.sigma:g}, Adam from {recipe.learning_rate:g}."
    )


def _table(study: Study, recipe: Recipe) -> str:
    n_eff = f"n_eff of {recipe.members}"
    header = ("variant", "unbiased", n_eff, "accuracy (%)", "± (%)", "share of dense (%)", "verdict")
    rows = [
        (
            result.variant.name,
            "yes" if result.outcome.unbiased else "no",
            format_number(result.outcome.effective_members),
            format_number(100 * result.accuracy.mean),
            format_number(None if result.accuracy.half is None else 100 * result.accuracy.half),
            ABSENT if result.share is None else format_number(100 * result.share),
            result.verdict,
        )
        for result in results_of(study, recipe.network)
    ]
    return table(header, rows)
