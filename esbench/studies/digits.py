"""Records of the digits study: how well a small network learns with each variant, and their file.

A study is one JSON file, ``<results>/<device>/digits/<study id>.json``. It is written whole again after every
training, so that one that was cut off loses at most the training under way; reading is strict. Nothing here
imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from esbench import store
from esbench.errors import UserError
from esbench.registry import UnavailableError, trainer
from esbench.schema import Count, Environment, Variant

SCHEMA = 1
FOLDER = "digits"
"""The folder of a device's results that holds its studies of this kind."""

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Decoding refuses fields that it does not know."""


class Recipe(_Strict, frozen=True, kw_only=True):
    """How a network is trained by evolution strategies: the same for every variant.

    Sampling is antithetic, so ``members`` are pairs. Every member sees the same ``batch`` images of a step.
    The optimizer is Adam, and its learning rate falls to zero as a cosine.
    """

    network: str
    members: Count = 128
    steps: Count = 150
    batch: Count = 32
    sigma: Positive = 0.05
    learning_rate: Positive = 0.02


class Outcome(_Strict, frozen=True, kw_only=True):
    """What came of a training.

    ``accuracy`` is the share of test images that were named rightly. ``unbiased``: entries of E_m are
    uncorrelated with variance 1, so that the estimate's mean over all draws is the gradient of a linear
    fitness. ``effective_members`` is what the quality law leaves of the pairs of unbiased noise, where a
    closed form is known.
    """

    accuracy: Share
    unbiased: bool
    effective_members: Positive | None = None


class Training(_Strict, frozen=True, kw_only=True):
    """One training: of what, by which variant, from which seed, in how many seconds, and its outcome."""

    variant: Variant
    network: str
    seed: int
    outcome: Outcome
    wall_s: float


class Untrained(_Strict, frozen=True, kw_only=True):
    """A variant that a network could not be trained with, and why; ``failed`` where it should have been."""

    variant: Variant
    network: str
    reason: str
    failed: bool = False


class Study(_Strict, frozen=True, kw_only=True):
    """All trainings of a study so far, and where they were run.

    ``code``: name -> hash of the source of each variant that takes part and of its package.
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

    def left(self) -> list[tuple[int, Recipe, Variant]]:
        """What is still to be trained: every variant with the first seed, then with the next one."""
        done = {(one.seed, one.network, one.variant) for one in self.trainings}
        without = {(one.network, one.variant) for one in self.untrained}
        return [
            (seed, recipe, variant)
            for seed in self.seeds
            for recipe in self.recipes
            for variant in self.variants
            if (seed, recipe.network, variant) not in done and (recipe.network, variant) not in without
        ]


def train(scheme: object, recipe: Recipe, seed: int, device: str) -> Outcome:
    """Train a network with a registered scheme.

    Raises:
        UnavailableError: the scheme cannot serve the network, or its package does not train.

    """
    found = trainer(scheme)
    if found is None:
        message = f"no training of {recipe.network} is known for {type(scheme).__name__}"
        raise UnavailableError(message)
    return found.train(scheme, recipe, seed, device)


def study_path(study: Study, results: Path) -> Path:
    """Return where a study is stored."""
    return results / study.environment.slug / FOLDER / f"{study.study_id}.json"


def write_study(study: Study, results: Path) -> Path:
    """Write a study in place of what it was before; an interrupt leaves one of the two.

    Raises:
        ValueError: it could not be read back.

    """
    return store.write_document(study, study_path(study, results))


def read_study(path: Path) -> Study:
    """Read a study.

    Raises:
        UserError: the file does not hold one; the message names file and field.

    """
    return store.read_document(path, Study, what="study of digits", schema=SCHEMA, again="train again")


def newest_study(results: Path, device: str) -> Study:
    """Read the newest study in a device's folder.

    Raises:
        UserError: there is none, or it cannot be read.

    """
    paths = sorted((results / device / FOLDER).glob("*.json"))
    if not paths:
        message = f"no study of digits in {results / device / FOLDER}: train with `esbench digits`"
        raise UserError(message)
    return read_study(paths[-1])


def newest_studies(results: Path) -> list[Study]:
    """Read the newest study of each device, in the order of their folders.

    Raises:
        UserError: one of them cannot be read.

    """
    return [newest_study(results, path.parent.name) for path in sorted(results.glob(f"*/{FOLDER}"))]
