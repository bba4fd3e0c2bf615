"""The digits study, how well a small network learns with each variant: its records and its page.

A study is one JSON file, ``<results>/<device>/digits/<study id>.json``, which is rewritten after every
training run. Nothing here imports torch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from esbench import store
from esbench.errors import UserError
from esbench.report.analysis.quality import Estimate, estimate
from esbench.report.formats import write
from esbench.report.formats.markdown import NOT_MET, join, table
from esbench.schema import Environment, Outcome, Recipe, Variant
from esbench.studies import newest_files, origin
from esbench.text import escape, one_line
from esbench.units import ABSENT, format_number

SCHEMA = 1
FOLDER = "digits"
"""The folder of the studies in a device's results."""
PAGE = "digits.md"
DENSE = Variant(scheme="Perturbed")
"""Independent Gaussian noise for every weight: the reference of every other variant."""
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


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose decoding rejects unknown fields."""


class Training(_Strict, frozen=True, kw_only=True):
    """One training run of a network with a variant and a seed."""

    variant: Variant
    network: str
    seed: int
    outcome: Outcome
    wall_s: float


class Untrained(_Strict, frozen=True, kw_only=True):
    """A variant that could not be trained; ``failed`` unless the scheme does not support the network."""

    variant: Variant
    network: str
    reason: str
    failed: bool = False


class Study(_Strict, frozen=True, kw_only=True):
    """All finished training runs of a study and their environment.

    ``code``: name -> hash of the source of each variant and of its package.
    """

    schema: int
    study_id: str
    started: str
    recipes: Annotated[tuple[Recipe, ...], msgspec.Meta(min_length=1)]
    seeds: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    variants: tuple[Variant, ...]
    environment: Environment
    code: dict[str, str] = {}
    trainings: tuple[Training, ...] = ()
    untrained: tuple[Untrained, ...] = ()

    def remaining_runs(self) -> list[tuple[int, Recipe, Variant]]:
        """Return the remaining training runs: all variants with the first seed, then with the next."""
        done = {(training.seed, training.network, training.variant) for training in self.trainings}
        without = {(failure.network, failure.variant) for failure in self.untrained}
        return [
            (seed, recipe, variant)
            for seed in self.seeds
            for recipe in self.recipes
            for variant in self.variants
            if (seed, recipe.network, variant) not in done and (recipe.network, variant) not in without
        ]


def study_path(study: Study, results: Path) -> Path:
    """Return the file of a study."""
    return results / study.environment.slug / FOLDER / f"{study.study_id}.json"


def newest_study(results: Path, device: str) -> Study:
    """Read the newest study of a device.

    Raises:
        UserError: there is no study, or it is invalid.

    """
    paths = sorted((results / device / FOLDER).glob("*.json"))
    if not paths:
        message = f"no digits study in {results / device / FOLDER}: train with `esbench digits`"
        raise UserError(message)
    return store.read_document(paths[-1], Study, what="digits study", schema=SCHEMA, again="train again")


def newest_studies(results: Path) -> list[Study]:
    """Read the newest study of each device, in the order of their folders.

    Raises:
        UserError: a study is invalid.

    """
    return [newest_study(results, path.parent.parent.name) for path in newest_files(results, FOLDER)]


# The page


class Line(NamedTuple):
    """The result of one variant on one network; ``share`` is relative to the accuracy of dense noise."""

    variant: Variant
    accuracy: Estimate
    share: float | None
    unbiased: bool
    effective_members: float | None

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty if there is no goal."""
        if not self.unbiased or self.variant == DENSE:
            return ""
        if self.share is None:
            return "not shown"
        return "met" if self.share >= GOAL else NOT_MET


def lines(study: Study, network: str) -> list[Line]:
    """Return the result of each variant that was trained on a network."""
    results = {}
    for variant in study.variants:
        trainings = [
            training
            for training in study.trainings
            if (training.variant, training.network) == (variant, network)
        ]
        if accuracy := estimate([training.outcome.accuracy for training in trainings]):
            results[variant] = (accuracy, trainings[0].outcome)
    dense = results[DENSE][0].mean if DENSE in results else None
    return [
        Line(
            variant,
            accuracy,
            accuracy.mean / dense if dense else None,
            outcome.unbiased,
            outcome.effective_members,
        )
        for variant, (accuracy, outcome) in results.items()
    ]


def verdict(study: Study, network: str) -> str:
    """Return how many unbiased variants reach the goal on a network, and which do not."""
    judged = [line for line in lines(study, network) if line.verdict in {"met", NOT_MET}]
    missed = [line.variant.name for line in judged if line.verdict == NOT_MET]
    count = f"{len(judged) - len(missed)} of {len(judged)} unbiased variants"
    text = f"{network}: {count} reach {GOAL:.0%} of dense noise's accuracy"
    return f"{text}; not {', '.join(missed)}" if missed else text


def reasons(study: Study, network: str) -> list[str]:
    """Return one line per variant that could not be trained on a network, with the reason."""
    return [
        f"{failure.variant.name}{' failed' if failure.failed else ''}: {one_line(failure.reason)}"
        for failure in study.untrained
        if failure.network == network
    ]


def render(results: Path, out: Path) -> list[Path]:
    """Write ``<out>/digits.md`` from the newest study of each device; nothing if there is no study.

    Raises:
        UserError: a study cannot be read.

    """
    studies = [study for study in newest_studies(results) if study.trainings]
    return [write(out / PAGE, page(studies))] if studies else []


def page(studies: Sequence[Study]) -> str:
    """Return the page as Markdown."""
    parts = ["# Learning digits with every variant", _INTRODUCTION]
    for study in studies:
        here, wall_s = study.environment, sum(training.wall_s for training in study.trainings)
        facts = [f"{len(study.seeds)} seeds", f"the trainings took {format_number(wall_s)} s"]
        parts += [f"## {escape(here.device_name)}", origin(study.study_id, study.started, here, facts)]
        for recipe in study.recipes:
            parts += [f"### {recipe.network}"]
            parts += [f"{_describe(recipe)} {escape(verdict(study, recipe.network))}.", _table(study, recipe)]
            if listed := [f"- {escape(reason)}" for reason in reasons(study, recipe.network)]:
                parts.append("\n".join(["Not trained:", "", *listed]))
            if missing := sum(
                unfinished.network == recipe.network for _, unfinished, _ in study.remaining_runs()
            ):
                parts.append(f"Incomplete: {missing} trainings are missing.")
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
            line.variant.name,
            "yes" if line.unbiased else "no",
            format_number(line.effective_members),
            format_number(100 * line.accuracy.mean),
            format_number(None if line.accuracy.half is None else 100 * line.accuracy.half),
            ABSENT if line.share is None else format_number(100 * line.share),
            line.verdict,
        )
        for line in lines(study, recipe.network)
    ]
    return table(header, rows)
